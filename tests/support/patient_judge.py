"""A judge of responses that has all the time it needs, however busy the machine is."""

from __future__ import annotations

from typing import Any

LONG_S = 3600.0


def without_hurry(judge: Any) -> Any:
    """From here on, no response exceeds the judge's time limit; its processes stay.

    Args:
        judge: a reward whose verifiers run in worker processes.
    """
    for pool in judge._pools.values():
        pool._timeout_s = LONG_S
    return judge

"""Memory of a rank over time as a Chrome trace, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from mppo.recipe.gpu_types import MIB
from mppo_simulate.rank import RankResult

SHOWN_BYTES = 16 * MIB
"""Smallest allocation, in bytes, that the trace shows as a bar."""


def write_memory_trace(path: Path, result: RankResult) -> None:
    """Write the trace: a counter of bytes by purpose, and a bar for each large allocation.

    The time axis counts allocations since the start of the rank; viewers show them as microseconds.

    Args:
        path: file of the trace.
        result: the simulated rank.
    """
    changes: dict[int, list[tuple[str, int]]] = defaultdict(list)
    events: list[dict[str, Any]] = []
    last = max((a.end or a.begin for a in result.allocations), default=0)
    for number, a in enumerate(result.allocations):
        end = last if a.end is None else a.end
        changes[a.begin].append((a.purpose, a.size))
        changes[end].append((a.purpose, -a.size))
        if a.size >= SHOWN_BYTES:
            common = {"name": f"{a.purpose} {a.size / MIB:.0f} MiB", "cat": "allocation",
                      "pid": result.rank, "tid": 1, "id": number}  # fmt: skip
            events.append({**common, "ph": "b", "ts": a.begin, "args": {"line": a.line}})
            events.append({**common, "ph": "e", "ts": end})
    now: Counter[str] = Counter()
    for moment in sorted(changes):
        for purpose, size in changes[moment]:
            now[purpose] += size
        shown = {purpose: round(size / MIB, 2) for purpose, size in now.items()}
        events.append({"name": "MiB", "ph": "C", "pid": result.rank, "ts": moment, "args": shown})
    path.write_text(json.dumps({"traceEvents": events}))

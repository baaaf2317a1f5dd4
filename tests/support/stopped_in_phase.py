"""The training program, one of whose ranks stops itself in a phase, as by SIGSTOP from outside."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from mppo.supervision.phase import current
from mppo.train import main as train


def main(argv: Sequence[str]) -> int:
    """``RANK PHASE KEY=VALUE ...``: the rank stops as soon as it is in the phase."""
    rank, wanted, *keys = argv
    if os.environ["RANK"] == rank:
        threading.Thread(target=_stop_in, args=(wanted,), daemon=True).start()
    return train(keys)


def _stop_in(wanted: str) -> None:
    while wanted not in current():
        time.sleep(0.0002)
    print(f"stopped in {wanted}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

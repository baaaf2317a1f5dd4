"""Ranks that wait for others at the start learn that one of another node has ended.

On its own node torchrun ends them. To the ranks of other nodes nothing is said: each torchrun waits
for its own ranks, and those wait for a rank that never comes, until ``collective_timeout_s``. So
whoever notices the end of a rank that has not met the others counts it in torchrun's store, which
all nodes reach.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

_KEY = "mppo/lost"
_CONNECT_S = 10.0
_POLL_S = 2.0


def report(environ: Mapping[str, str]) -> None:
    """Count a rank that has ended before it met the others, if its torchrun will not restart it.

    A torchrun that restarts its ranks makes those of the other nodes do so too.

    Args:
        environ: the rank's environment.

    Raises:
        torch.distributed.DistError: torchrun's store is gone.
    """
    if environ["TORCHELASTIC_RESTART_COUNT"] == environ["TORCHELASTIC_MAX_RESTARTS"]:
        _store(environ).add(_KEY, 1)


def exit_with_lost_ranks(environ: Mapping[str, str]) -> None:
    """From here on, end this process when a rank is counted.

    Several starts use the same store. In the first one every loss counts, also one before this
    call; later, only a new one.

    Args:
        environ: this rank's environment.

    Raises:
        torch.distributed.DistError: torchrun's store does not answer.
    """
    store = _store(environ)
    before = 0 if environ["TORCHELASTIC_RESTART_COUNT"] == "0" else store.add(_KEY, 0)

    def poll() -> None:
        try:
            while store.add(_KEY, 0) == before:
                time.sleep(_POLL_S)
        except dist.DistError:  # torchrun has exited, which the heartbeat notices
            return
        where = f"rank {environ['RANK']} of {environ['WORLD_SIZE']}"
        print(
            f"mppo: {where}: a rank of another node ended before all ranks had met; see the "
            "output of that node",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    threading.Thread(target=poll, name="lost ranks", daemon=True).start()


def _store(environ: Mapping[str, str]) -> TCPStore:
    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    timeout = timedelta(seconds=_CONNECT_S)
    return TCPStore(address, port, timeout=timeout, wait_for_workers=False)

"""A process beside each rank that kills stopped ranks and removes what a killed rank has left.

A rank that is stopped (SIGSTOP, a debugger) cannot end itself, and of all signals only SIGKILL
takes effect. Before the heartbeat begins and after it has ended no other rank notices; a launcher
that ends the job waits for the stopped rank, for as long as it was told to wait for saves.

Each rank starts a guard first of all. The guard kills its rank if that stays stopped for longer
than the heartbeat's limit, and then the launcher ends the rest of the job. It also watches the
other ranks of its node, since a rank may be stopped before it has started its own guard. It needs
neither another rank nor torch, so it works if all ranks of a node are stopped. Linux only.

When a rank ends before all ranks have met, its torchrun ends those of its node. Nobody tells the
ranks of other nodes, which wait for one that never comes until ``collective_timeout_s``. So the
guard of the rank counts it in torchrun's store, which all nodes reach, and every rank polls that.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from mppo.parallel.launch import PARENT, LaunchInfo, discover, is_over_nodes, prepare_imports
from mppo.safety.temporary import remove_leftovers
from mppo.supervision.health import AwakeClock

if TYPE_CHECKING:  # imported only where it is needed: it takes seconds
    from torch._C._distributed_c10d import TCPStore

STARTING_S = 20.0
"""Longest stop until the rank has read its recipe."""
AFTER_HEARTBEAT_S = 3.0
"""Added to the heartbeat's limit: the other ranks report a silent rank with its phase first."""
_OTHER_RANKS_S = 3.0
"""Added for other ranks: each rank's own guard comes first."""
_POLL_S = 0.5
_ENDING_POLL_S = 0.02
_LOST_POLL_S = 2.0
_STORE_S = 10.0
_MET = "met"
_LOST = "mppo/lost"
"""Key of torchrun's store: number of ranks that ended before all ranks had met."""
_STOPPED = (["T"], ["t"])
"""States in ``/proc/PID/stat``: stopped by a signal, stopped by a debugger."""


class RankGuard:
    """The rank's end of the guard. Start it as early as possible: until then only the other ranks'
    guards watch this rank. A program without a launcher has no guard: nobody waits for it, and
    Ctrl-Z may stop it for as long as the user likes."""

    def __init__(self, info: LaunchInfo) -> None:
        self._pipe: int | None = None
        self._watch: threading.Thread | None = None
        self._watch_over = threading.Event()
        if info.how == "python" or sys.platform != "linux":
            return
        reader, self._pipe = os.pipe()
        name = f"rank {info.rank} of {info.world_size}"
        module = ["-m", "mppo.supervision.rank_guard"]
        os.posix_spawn(
            sys.executable,
            [sys.executable, *module, str(os.getpid()), str(PARENT), name],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, reader, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            ],
            setsid=True,
        )
        os.close(reader)

    def set_limit(self, silence_s: float) -> None:
        """Set the longest stop from the seconds after which the heartbeat counts a rank as dead."""
        self._tell(f"{silence_s + AFTER_HEARTBEAT_S}")

    def watch_other_nodes(self) -> None:
        """End this process if a rank of another node ends before all have met, until ``met``."""
        if self._pipe is None or not is_over_nodes(os.environ):
            return
        from torch.distributed import DistError

        with suppress(DistError):  # torchrun has exited, as the process group will report
            store = _torchruns_store()
            # restarts share the store: in the first start every loss counts, then only a new one
            known = 0 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else store.add(_LOST, 0)
            arguments = store, known, self._watch_over
            self._watch = threading.Thread(
                target=_exit_with_lost_rank, args=arguments, name="lost ranks", daemon=True
            )
            self._watch.start()
            atexit.register(self._end_watch)

    def met(self) -> None:
        """Tell the guard that all ranks have met: they notice by themselves if this one ends."""
        self._tell(_MET)
        self._end_watch()

    def _end_watch(self) -> None:
        """A thread in a call of the store would abort the process when the interpreter ends."""
        self._watch_over.set()
        if self._watch is not None:
            self._watch.join(_STORE_S)

    def _tell(self, word: str) -> None:
        if self._pipe is not None:
            with suppress(BrokenPipeError):  # the guard was killed: the launcher remains
                os.write(self._pipe, f"{word}\n".encode())


def start_guarded() -> tuple[LaunchInfo, RankGuard]:
    """Begin a program that a launcher may have started on many ranks; ValueError if the launcher's
    variables are wrong."""
    prepare_imports()
    info = discover()
    return info, RankGuard(info)


def main(arguments: list[str]) -> int:
    """Guard a rank until it ends: process ids of the rank and of its launcher, the rank's name."""
    rank, launcher, name = int(arguments[0]), int(arguments[1]), arguments[2]
    command = _read(Path(f"/proc/{rank}/cmdline"))
    limit_s, clock, stopped_since = STARTING_S, AwakeClock(_POLL_S), dict[int, float]()
    met = False
    while os.getppid() == rank:
        if select.select([0], [], [], _POLL_S)[0]:
            words = os.read(0, 1 << 10).decode().split()
            if not words:  # the rank is ending, and this process's parent until it has
                time.sleep(_ENDING_POLL_S)
            met |= _MET in words
            limit_s = next((float(word) for word in words if word != _MET), limit_s)
        now, watched = clock.now(), {rank, *_other_ranks(launcher, command)}
        stopped_since = {
            process: stopped_since.get(process, now) for process in watched if _is_stopped(process)
        }
        for process, since in stopped_since.items():
            is_own = process == rank
            if now - since > limit_s + (0 if is_own else _OTHER_RANKS_S):
                _kill(process, name if is_own else "a rank", now - since)
    remove_leftovers()
    if not met:
        _report_lost()
    return 0


def _report_lost() -> None:
    """Count this guard's rank as lost, for the ranks of other nodes. A torchrun that restarts its
    ranks makes those of the other nodes do so too."""
    environ = os.environ
    if not is_over_nodes(environ):
        return
    if environ["TORCHELASTIC_RESTART_COUNT"] != environ["TORCHELASTIC_MAX_RESTARTS"]:
        return
    from torch.distributed import DistError

    with suppress(DistError):  # torchrun's store has gone, and the ranks see that too
        _torchruns_store().add(_LOST, 1)


def _exit_with_lost_rank(store: TCPStore, known: int, over: threading.Event) -> None:
    from torch.distributed import DistError

    with suppress(DistError):  # torchrun has exited, which the heartbeat notices
        while store.add(_LOST, 0) == known:
            if over.wait(_LOST_POLL_S):
                return
        where = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
        why = "a rank of another node ended before all ranks had met; see the output of that node"
        print(f"mppo: {where}: {why}", file=sys.stderr, flush=True)
        os._exit(1)


def _torchruns_store() -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, timeout=timedelta(seconds=_STORE_S), wait_for_workers=False)


def _kill(process: int, name: str, seconds: float) -> None:
    text = f"mppo: {name} (pid {process} on {socket.gethostname()}) has been stopped for "
    text += f"{seconds:.0f} s, by SIGSTOP or a debugger: killing it\n"
    with suppress(OSError):  # it has ended in the meantime, or nobody reads standard error
        os.kill(process, signal.SIGKILL)
        os.write(2, text.encode())


def _other_ranks(launcher: int, command: str) -> list[int]:
    children: list[int] = []
    with suppress(OSError):  # the launcher has ended
        for thread in Path(f"/proc/{launcher}/task").glob("*/children"):
            children += map(int, _read(thread).split())
    return [child for child in children if _read(Path(f"/proc/{child}/cmdline")) == command]


def _is_stopped(process: int) -> bool:
    state = _read(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()[:1]
    return state in _STOPPED


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

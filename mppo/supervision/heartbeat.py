"""Every rank sends heartbeats; a dead or hung rank ends the job everywhere within seconds.

A thread of each rank writes the rank's state into a key-value store of the job, which the first
rank hosts. The first rank diagnoses the job: a rank without a heartbeat for too long is dead; if no
rank makes progress for too long, a collective hangs. The other ranks read its diagnosis and watch
its heartbeat. If the first rank's process is stopped or its node freezes, the store does not
answer, and each rank diagnoses that by itself. Each rank also watches its torchrun, since no other
process would end the ranks if torchrun is killed. After a diagnosis each rank writes the stacks of
all its threads into the run folder and exits with code 1, even if its main thread is blocked.

A rank that fails with an error publishes the error and then shuts down cleanly. If several ranks
fail within moments, each shuts down cleanly and only the first error is printed. The remaining
ranks end as after a diagnosis. So does a failed rank whose clean-up takes too long.

If all ranks end silently with exit code 0, no heartbeat remains to notice: ``no_early_success``.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from mppo.parallel import device
from mppo.parallel.collectives import broadcast_object
from mppo.parallel.launch import PARENT, LaunchInfo
from mppo.recipe.errors import ConfigError
from mppo.safety.redact import redact_text
from mppo.supervision import exit_report, phase, stop_request
from mppo.supervision.health import AwakeClock, Beat, HealthMonitor

EXIT_CODE = 1
CLEANUP_S = 20.0
"""Longest clean-up of a failed rank: less than the 30 s after which launchers send SIGKILL."""
SAVING = "save_checkpoint"
"""The phase that a stop request never cuts short."""
_DIAGNOSIS, _FAILURE, _FAILED, _STOPPED, _STOP = (
    "diagnosis", "failure", "failed", "stopped", "stop",
)  # fmt: skip
"""Keys of the store."""
_STOP_TIMEOUT_S = 60.0
"""How long the first rank waits at the end of the run for the others to stop."""
_LINGER_BEATS = 3
"""Intervals for which the first rank keeps its store after a diagnosis, so the others read it."""
_SAME_FAILURE_BEATS = 2
"""Intervals after another rank's failure in which this rank may still fail by itself."""


class AlreadyReported(Exception):
    """Replaces an error that has been published to the other ranks and printed by some rank."""


@dataclass(frozen=True)
class Failure:
    """An error that ends the job: rank, phase and last step; type and message of the error."""

    where: str
    reason: str


class CleanupDeadline:
    """A time limit for a failed rank to stop what it runs and to destroy its process groups: a
    context around everything that such a rank has to clean up."""

    def __init__(self, limit_s: float = CLEANUP_S) -> None:
        self.limit_s = limit_s
        self._left = threading.Event()

    def __enter__(self) -> CleanupDeadline:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def begin(self, on_timeout: Callable[[], None]) -> None:
        """Start the clock; a thread calls ``on_timeout`` if the context is not left in time."""

        def wait() -> None:
            if not self._left.wait(self.limit_s):
                on_timeout()

        threading.Thread(target=wait, name="clean-up deadline", daemon=True).start()


class _WatchedStore:
    """A ``TCPStore`` that the first rank hosts. Construct collectively, in the default process
    group. If a call waits longer than ``silence_s`` for its answer, ``on_silence`` is called once,
    in the watch's thread, with the seconds it has waited.

    If the first rank's process is stopped or its node freezes, the connection stays open and a call
    waits without limit: the timeout of ``TCPStore`` applies to connecting and to waiting for a key,
    not to the answer to ``check`` or ``add``. The call holds the store's lock but not the
    interpreter's, so a thread that never calls the store can measure how long the call waits.
    """

    def __init__(
        self,
        info: LaunchInfo,
        interval_s: float,
        silence_s: float,
        on_silence: Callable[[float], None],
    ) -> None:
        self.clock = AwakeClock(interval_s)
        self._interval_s, self._silence_s, self._on_silence = interval_s, silence_s, on_silence
        self._call_began: dict[int, float] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="store watch", daemon=True).start()
        self._store = self._connect(info)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of ``TCPStore``; the watch measures how long each call waits."""
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            with self._calling():
                return method(*arguments)

        return call

    def close(self) -> None:
        self._closed.set()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        thread = threading.get_ident()
        self._call_began[thread] = self.clock.now()
        try:
            yield
        finally:
            del self._call_began[thread]

    def _watch(self) -> None:
        while not self._closed.wait(self._interval_s):
            now = self.clock.now()
            waited = now - min(list(self._call_began.values()), default=now)
            if waited > self._silence_s:
                self._on_silence(waited)
                return

    def _connect(self, info: LaunchInfo) -> TCPStore:
        port, listener = 0, None
        if info.rank == 0:
            listener = _listen(info.master_addr)
            port = listener.getsockname()[1]
        port = broadcast_object(port)
        with self._calling():
            store = TCPStore(
                info.master_addr,
                port,
                is_master=info.rank == 0,
                wait_for_workers=False,
                timeout=timedelta(seconds=60),
                master_listen_fd=None if listener is None else listener.detach(),
            )
        return store


def _listen(address: str) -> socket.socket:
    """Listen on the interface of ``address``; on all interfaces if the address is not this host's.
    Behind network address translation the rendezvous address belongs to another machine."""
    for host in (address, ""):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((host, 0))
        except OSError:
            listener.close()
            continue
        listener.listen(socket.SOMAXCONN)
        return listener
    raise OSError(f"no free port on {address}")


class Heartbeat:
    """This rank's heartbeat and its watch over the others.

    Construct collectively, in the default process group; the watch starts at once. A rank without a
    heartbeat for ``silence_s`` is dead; without progress of any rank for ``hang_s`` the job hangs.
    ``stacks`` is the folder for the stacks of a job that is ended, ``cleanup`` the deadline that
    encloses this heartbeat and the process groups; ``on_failure`` prints an error of this rank.
    """

    def __init__(
        self,
        info: LaunchInfo,
        silence_s: float,
        hang_s: float,
        stacks: Path,
        cleanup: CleanupDeadline,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._info, self._stacks = info, stacks
        self._cleanup, self._on_failure = cleanup, on_failure
        self._interval_s = min(1.0, silence_s / 10)
        # the others watch the first rank alone, whose progress says nothing about a hang
        hang_s = hang_s if info.rank == 0 else math.inf
        self._monitor = HealthMonitor(info.world_size, silence_s, hang_s)
        self._diagnosed_here = False
        self._remote_failure: Failure | None = None
        self._unreported: BaseException | None = None
        self._exit_lock = threading.Lock()
        self._beats_sent = 0
        self._launcher = PARENT if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._stopping = threading.Event()
        self._stop_forwarded = False
        self._store = _WatchedStore(info, self._interval_s, silence_s, self._exit_without_store)
        self._send_beat()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    @contextmanager
    def running(self) -> Iterator[Heartbeat]:
        """Report a failure inside (``report_failures``); stop the watch after a clean end."""
        with self.report_failures():
            dist.barrier()  # a rank without a first beat is not watched yet
            yield self
        self.stop()

    @contextmanager
    def report_failures(self) -> Iterator[None]:
        """Publish a failure inside at once, before any enclosing context cleans up. May be nested.
        AlreadyReported replaces it. A ``ConfigError`` is raised unchanged: every rank raises the
        same one, and the first rank prints it."""
        try:
            yield
        except AlreadyReported:
            raise
        except ConfigError:
            if not self._stopping.is_set():
                self._begin_cleanup()
                self._await_others()
            raise
        except (Exception, SystemExit) as error:
            self._report(error)
            raise AlreadyReported from error

    def stop(self) -> None:
        """End the watch after a clean end of the run. Collective; the first rank returns last."""
        dist.barrier()
        self._stopping.set()
        self._thread.join()
        stopped = self._store.add(_STOPPED, 1)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while self._info.rank == 0 and stopped < self._info.world_size:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
            stopped = self._store.add(_STOPPED, 0)
        self._store.close()

    def _report(self, error: BaseException) -> None:
        """Publish an error to the other ranks; print it unless another rank gave the same reason.
        An error that only reflects another rank's exit is not published before the watch had time
        to learn which rank it was: the watch then ends this process with that rank's reason."""
        if is_consequence(error):
            self._thread.join(self._monitor.silence_s + 5)
        self._begin_cleanup()
        where = f"{self._name()} failed in: {phase.current()}; {_last_step()}"
        mine = Failure(where, f"{type(error).__name__}: {error}")
        self._unreported = error
        first = self._first_failure(mine)
        self._unreported = None
        if first == mine or first.reason != mine.reason:
            self._on_failure(error)
        self._await_others()

    def _first_failure(self, mine: Failure) -> Failure:
        """Publish this rank's failure unless another rank has; return the published one."""
        try:
            published = self._store.compare_set(_FAILURE, "", json.dumps(asdict(mine)))
        except dist.DistError:  # the first rank has exited, and its store with it
            return self._remote_failure or mine
        return Failure(**json.loads(published))

    def _begin_cleanup(self) -> None:
        """End the watch; from here on only the clean-up has a time limit."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._cleanup.begin(self._exit_after_cleanup)

    def _exit_after_cleanup(self) -> None:
        self._diagnosed_here, self._remote_failure = True, None
        limit_s = self._cleanup.limit_s
        self._exit(f"{self._name()} failed and did not shut down within {limit_s:.0f} s")

    def _exit_without_store(self, seconds: float) -> None:
        """The first rank's store does not answer, so no other rank can diagnose or be informed."""
        self._diagnosed_here, self._remote_failure = True, None
        self._exit(self._monitor.silent(0, seconds))

    def _await_others(self) -> None:
        """Wait until every rank has failed too, or has had time to read the failure and exit. The
        first rank's store and every rank's connections must not close earlier."""
        beats = _LINGER_BEATS + _SAME_FAILURE_BEATS
        deadline = time.monotonic() + beats * self._interval_s
        with suppress(dist.DistError):  # the first rank has exited: no rank waits any more
            failed = self._store.add(_FAILED, 1)
            while failed < self._info.world_size and time.monotonic() < deadline:
                time.sleep(0.05)
                failed = self._store.add(_FAILED, 0)
        self._store.close()

    def _name(self) -> str:
        return f"rank {self._info.rank} of {self._info.world_size}"

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self._send_beat()
                why = self._watch()
            except dist.DistError:
                if self._stopping.is_set():
                    return
                self._diagnosed_here, why = True, self._monitor.lost(0)
            if why is None:
                continue
            # a failure often hits all ranks: give this one time to fail and clean up by itself
            patience_s = _SAME_FAILURE_BEATS * self._interval_s
            if self._remote_failure is None or not self._stopping.wait(patience_s):
                self._exit(why)
            return

    def _send_beat(self) -> None:
        self._beats_sent += 1
        state = phase.progress(), phase.current(), phase.last_step()
        beat = Beat(self._beats_sent, *state, socket.gethostname(), os.getpid())
        self._store.set(f"beat/{self._info.rank}", json.dumps(asdict(beat)))

    def _forward_stop(self) -> None:
        if self._stop_forwarded:
            return
        if stop_request.is_requested():
            self._store.set(_STOP, "1")
        elif self._store.check([_STOP]):
            stop_request.request()
        self._stop_forwarded = stop_request.is_requested()

    def _watch(self) -> str | None:
        self._forward_stop()
        if stop_request.overdue() and SAVING not in phase.current():
            self._diagnosed_here = True
            return (
                f"{self._name()} did not stop in time; it was in: {phase.current()}; "
                f"{_last_step()}; start the run again to continue from its newest complete "
                "checkpoint"
            )
        if self._launcher not in (None, os.getppid()):
            return f"torchrun (pid {self._launcher}) has exited"
        if self._store.check([_DIAGNOSIS]):
            return self._store.get(_DIAGNOSIS).decode()
        if self._store.check([_FAILURE]):
            failure = Failure(**json.loads(self._store.get(_FAILURE)))
            self._remote_failure = failure
            return f"{failure.where}: {failure.reason}"
        return self._diagnose()

    def _diagnose(self) -> str | None:
        """Diagnose the ranks this one watches: all on the first rank, the first on the others."""
        ranks = range(self._info.world_size) if self._info.rank == 0 else range(1)
        keys = {f"beat/{rank}": rank for rank in ranks}
        if not self._store.check(list(keys)):
            return None
        values = self._store.multi_get(list(keys))
        beats = {rank: Beat(**json.loads(v)) for rank, v in zip(keys.values(), values)}
        now = self._store.clock.now()
        self._monitor.update(beats, now)
        why = self._monitor.diagnose(now)
        self._diagnosed_here = why is not None
        if why is not None and self._info.rank == 0:
            self._store.set(_DIAGNOSIS, why)
        return why

    def _exit(self, why: str) -> None:
        """Write the stacks, print the reason, end the process. The first rank prints for the job;
        if the first rank has exited, one rank of each node does. The rank that failed has already
        printed the reason of a failure."""
        self._exit_lock.acquire()  # never released: a second thread blocks until the process ends
        if self._unreported is not None:
            self._on_failure(self._unreported)
        failure = self._remote_failure
        lines = [f"{failure.where}; see that rank's output for the error" if failure else why]
        try:
            self._write_stacks(why)
            lines.append(f"stacks of every rank: {self._stacks}")
        except OSError as error:
            lines.append(f"{self._name()} could not write its stacks: {error}")
        if self._info.rank == 0 or (self._diagnosed_here and self._info.local_rank <= 1):
            text = "".join(f"mppo: {line}\n" for line in lines)
            sys.stderr.write(text)
            sys.stderr.flush()
            exit_report.write_reason(text)
        if self._info.rank == 0:
            time.sleep(_LINGER_BEATS * self._interval_s)
        os._exit(EXIT_CODE)

    def _write_stacks(self, why: str) -> None:
        self._stacks.mkdir(parents=True, exist_ok=True)
        with (self._stacks / f"rank_{self._info.rank:05d}.txt").open("w") as stream:
            stream.write(f"{redact_text(why)}\n\nthis rank: {phase.current()}\n\n")
            stream.flush()
            faulthandler.dump_traceback(stream, all_threads=True)


@contextmanager
def no_early_success() -> Iterator[None]:
    """Inside, ``os._exit(0)`` in this process prints an error and exits with code 1. Other code (a
    model's Python files, a library) that calls it ends a rank silently. Processes forked from this
    one are not affected."""
    exit_now, owner = os._exit, os.getpid()

    def exit_with_error(code: int) -> NoReturn:
        if code == 0 and os.getpid() == owner:
            text = f"os._exit(0) was called before the run had finished, while {phase.current()}"
            exit_report.say(text)
            exit_report.write_reason(f"mppo: {text}")
            code = EXIT_CODE
        exit_now(code)

    os._exit = exit_with_error
    try:
        yield
    finally:
        os._exit = exit_now


def is_consequence(error: BaseException) -> bool:
    """Whether an error only reflects that another rank has exited."""
    return isinstance(error, dist.DistError) or device.is_transport_error(error)


def _last_step() -> str:
    return f"last completed step: {phase.last_step()}"

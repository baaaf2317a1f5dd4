"""Every rank shows signs of life; a dead or hung one ends the job everywhere within seconds.

A thread of each rank writes what the rank does into a key-value store of the job's own, hosted by
the first rank. The first rank judges: a rank that was silent too long is dead; if no rank has made
progress for too long, a collective hangs. The others watch for its verdict, and for its own signs
of life; where its process or node stands still, the store does not answer, and that is the verdict
on the first rank. All watch their torchrun, for nobody else would end them when it is killed. On a
verdict each rank writes the stacks of all its threads into the run's folder and exits with code 1,
whatever its main thread waits for.

A rank that fails with an error tells it to the others, and leaves in order. A failure often befalls
every rank: whoever fails as well, moments later, leaves in order, too, and repeats nothing that has
been told. The others end as on a verdict, and so does one whose way out takes too long.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch.distributed as dist

from mppo.config.errors import ConfigError
from mppo.parallel import device
from mppo.parallel.launch import PARENT, LaunchInfo
from mppo.safety.redact import redact_text
from mppo.supervision import last_words, phase, stop_request
from mppo.supervision.cleanup_deadline import CleanupDeadline
from mppo.supervision.watched_store import WatchedStore

EXIT_CODE = 1
SAVING = "save_checkpoint"
"""The phase that is left to end, however long it takes."""
_VERDICT, _FAILURE, _FAILED, _FAREWELL, _STOP = "verdict", "failure", "failed", "farewell", "stop"
_FAREWELL_S = 60.0
_LINGER_BEATS = 3
"""The first rank's store outlives a verdict by so many beats, for the others to read it."""
_AS_WELL_BEATS = 2
"""So long after another rank's failure this one may still fail by itself."""


class AlreadyReported(Exception):
    """In place of an error that has been told: to the other ranks, and in some rank's output."""


@dataclass(frozen=True)
class Failure:
    """An error that ends the job.

    Args:
        where: rank, phase and last completed step.
        reason: type and message of the error.
    """

    where: str
    reason: str


@dataclass(frozen=True)
class Beat:
    """A sign of life.

    Args:
        number: counts the rank's beats.
        progress: counts what the rank has begun or ended.
        phase: what it does.
        last_step: the last PPO step it has completed.
        host, pid: where to look for it.
    """

    number: int
    progress: int
    phase: str
    last_step: int
    host: str
    pid: int


@dataclass
class HealthMonitor:
    """Decides from the beats of all ranks whether the job is well.

    Args:
        world_size: number of ranks.
        silence_s: a rank without a new beat for so long is dead.
        hang_s: without progress of any rank for so long, the job hangs.
    """

    world_size: int
    silence_s: float
    hang_s: float
    _beats: dict[int, Beat] = field(default_factory=dict)
    _seen: dict[int, float] = field(default_factory=dict)
    _progress_at: float | None = None

    def update(self, beats: Mapping[int, Beat], now: float) -> None:
        """Take the newest known beat of each rank, at ``now`` seconds."""
        for rank, beat in beats.items():
            before = self._beats.get(rank)
            if before is None or before.number != beat.number:
                self._seen[rank] = now
            if before is None or before.progress != beat.progress or self._progress_at is None:
                self._progress_at = now
            self._beats[rank] = beat

    def diagnose(self, now: float) -> str | None:
        """Why the job must end, None while it is well."""
        for rank in sorted(self._seen):
            silence = now - self._seen[rank]
            if silence > self.silence_s:
                return self.silent(rank, silence)
        if self._progress_at is not None and now - self._progress_at > self.hang_s:
            return self._hang(now - self._progress_at)
        return None

    def silent(self, rank: int, seconds: float) -> str:
        """The verdict on a rank that was silent for so long."""
        return f"no sign of life for {seconds:.0f} s from {self._describe(rank)}"

    def lost(self, rank: int) -> str:
        """The verdict on a rank whose connection broke."""
        return f"the connection broke to {self._describe(rank)}"

    def _describe(self, rank: int) -> str:
        if rank not in self._beats:
            return f"rank {rank} of {self.world_size}"
        beat = self._beats[rank]
        # the rank may have ended several short steps after its last beat
        last_step = max(other.last_step for other in self._beats.values())
        return (
            f"rank {rank} of {self.world_size} (pid {beat.pid} on {beat.host}), which was in: "
            f"{beat.phase}; last completed step: {last_step}"
        )

    def _hang(self, seconds: float) -> str:
        doing: dict[str, list[int]] = {}
        for rank, beat in sorted(self._beats.items()):
            doing.setdefault(f"{beat.phase}; last completed step: {beat.last_step}", []).append(
                rank
            )
        where = "\n".join(f"  rank {_ranges(ranks)}: {what}" for what, ranks in doing.items())
        return f"no rank has made progress for {seconds:.0f} s:\n{where}"


def _ranges(ranks: Sequence[int]) -> str:
    """``0-3,7`` for 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)


class Heartbeat:
    """This rank's part of the watch. Construct collectively, in the default process group.

    Args:
        info: this process's place.
        silence_s: a rank that is silent for so long is dead.
        hang_s: longest time without progress of any rank.
        stacks: folder for the stacks of a job that was ended.
        way_out: around this and the process groups.
        tell: puts an error of this rank into its output.
        end: called with the exit code, once everything is said.
    """

    def __init__(
        self,
        info: LaunchInfo,
        silence_s: float,
        hang_s: float,
        stacks: Path,
        way_out: CleanupDeadline,
        tell: Callable[[BaseException], None],
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._info, self._stacks, self._end = info, stacks, end
        self._way_out, self._tell = way_out, tell
        self._interval_s = min(1.0, silence_s / 10)
        hears_all = info.rank == 0
        self._judge = HealthMonitor(info.world_size, silence_s, hang_s if hears_all else math.inf)
        self._judged_here = False
        self._heard: Failure | None = None
        self._untold: BaseException | None = None
        self._leaving = threading.Lock()
        self._number = 0
        self._launcher = PARENT if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._stopping = threading.Event()
        self._told_to_stop = False
        self._store = WatchedStore(info, self._interval_s, silence_s, self._leave_frozen)
        self._beat()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    @contextmanager
    def report_failures(self) -> Iterator[None]:
        """A failure inside is told at once, before anything around this is stopped. May be nested.

        Raises:
            AlreadyReported: in place of the failure. A ``ConfigError`` is raised as it is: every
                rank finds it, and the first one reports it.
        """
        try:
            yield
        except AlreadyReported:
            raise
        except ConfigError:
            if not self._stopping.is_set():
                self._begin_way_out()
                self._await_others()
            raise
        except (Exception, SystemExit) as error:
            self._fail(error)
            raise AlreadyReported from error

    def _fail(self, error: BaseException) -> None:
        """Tell the other ranks, and the user unless another rank has given the same reason.

        Where the error only says that another rank has gone, wait until it is known which one; the
        watch then ends this process with that reason.
        """
        if is_consequence(error):
            self._thread.join(self._judge.silence_s + 5)
        self._begin_way_out()
        where = f"{self._name()} failed in: {phase.current()}; {_last_step()}"
        mine = Failure(where, f"{type(error).__name__}: {error}")
        self._untold = error
        first = self._first_failure(mine)
        self._untold = None
        if first == mine or first.reason != mine.reason:
            self._tell(error)
        self._await_others()

    def _first_failure(self, mine: Failure) -> Failure:
        """This rank's failure, unless another's came before."""
        try:
            told = self._store.compare_set(_FAILURE, "", json.dumps(asdict(mine)))
        except dist.DistError:  # the first rank has gone, and with it the store: all have noticed
            return self._heard or mine
        return Failure(**json.loads(told))

    def _begin_way_out(self) -> None:
        """The watch ends; from now on only the way out may not take too long."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._way_out.begin(self._leave_late)

    def _leave_late(self) -> None:
        self._judged_here, self._heard = True, None
        limit_s = self._way_out.limit_s
        self._leave(f"{self._name()} has failed, and was not out {limit_s:.0f} s later")

    def _leave_frozen(self, seconds: float) -> None:
        """The first rank's store does not answer: nobody else can judge, or be told."""
        self._judged_here, self._heard = True, None
        self._leave(self._judge.silent(0, seconds))

    def _await_others(self) -> None:
        """Stay until every rank has failed, too, or has had time to hear and to leave: the first
        rank's store and every rank's connections must not go before."""
        deadline = time.monotonic() + (_LINGER_BEATS + _AS_WELL_BEATS) * self._interval_s
        with suppress(dist.DistError):  # the first rank has gone: nobody waits any more
            failed = self._store.add(_FAILED, 1)
            while failed < self._info.world_size and time.monotonic() < deadline:
                time.sleep(0.05)
                failed = self._store.add(_FAILED, 0)
        self._store.close()

    def _name(self) -> str:
        return f"rank {self._info.rank} of {self._info.world_size}"

    def stop(self) -> None:
        """End the watch on the clean way out, collectively; the first rank leaves last."""
        dist.barrier()
        self._stopping.set()
        self._thread.join()
        here = self._store.add(_FAREWELL, 1)
        deadline = time.monotonic() + _FAREWELL_S
        while self._info.rank == 0 and here < self._info.world_size:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
            here = self._store.add(_FAREWELL, 0)
        self._store.close()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self._beat()
                why = self._watch()
            except dist.DistError:
                if self._stopping.is_set():
                    return
                self._judged_here, why = True, self._judge.lost(0)
            if why is None:
                continue
            as_well_s = _AS_WELL_BEATS * self._interval_s
            if self._heard is None or not self._stopping.wait(as_well_s):
                self._leave(why)
            return

    def _beat(self) -> None:
        self._number += 1
        beat = Beat(
            self._number,
            phase.progress(),
            phase.current(),
            phase.last_step(),
            socket.gethostname(),
            os.getpid(),
        )
        self._store.set(f"beat/{self._info.rank}", json.dumps(asdict(beat)))

    def _pass_on_stop(self) -> None:
        """A request to stop reaches every rank, whichever got the signal."""
        if self._told_to_stop:
            return
        if stop_request.is_requested():
            self._store.set(_STOP, "1")
        elif self._store.check([_STOP]):
            stop_request.request()
        self._told_to_stop = stop_request.is_requested()

    def _watch(self) -> str | None:
        self._pass_on_stop()
        if stop_request.overdue() and SAVING not in phase.current():
            self._judged_here = True
            return (
                f"{self._name()} could not stop in time, it was in: {phase.current()}; "
                f"{_last_step()}; started again, the run goes on from its newest complete "
                "checkpoint"
            )
        if self._launcher not in (None, os.getppid()):
            return f"torchrun (pid {self._launcher}) has gone"
        if self._store.check([_VERDICT]):
            return self._store.get(_VERDICT).decode()
        if self._store.check([_FAILURE]):
            self._heard = Failure(**json.loads(self._store.get(_FAILURE)))
            return f"{self._heard.where}: {self._heard.reason}"
        ranks = range(self._info.world_size) if self._info.rank == 0 else range(1)
        keys = {f"beat/{rank}": rank for rank in ranks}
        if not self._store.check(list(keys)):
            return None
        values = self._store.multi_get(list(keys))
        beats = {rank: Beat(**json.loads(v)) for rank, v in zip(keys.values(), values)}
        now = self._store.clock.now()
        self._judge.update(beats, now)
        why = self._judge.diagnose(now)
        self._judged_here = why is not None
        if why is not None and self._info.rank == 0:
            self._store.set(_VERDICT, why)
        return why

    def _leave(self, why: str) -> None:
        """Write the stacks, say why, end the process.

        The first rank speaks for the job; where it has gone, one rank of each node does. The reason
        of a failure is in the output of the rank that failed already.
        """
        self._leaving.acquire()  # for good: whoever comes second waits for the end of the process
        if self._untold is not None:
            self._tell(self._untold)
        lines = [f"{self._heard.where}; that rank says why" if self._heard else why]
        try:
            self._write_stacks(why)
            lines.append(f"stacks of every rank: {self._stacks}")
        except OSError as error:
            lines.append(f"{self._name()} could not write its stacks: {error}")
        if self._info.rank == 0 or (self._judged_here and self._info.local_rank <= 1):
            text = "".join(f"mppo: {line}\n" for line in lines)
            sys.stderr.write(text)
            sys.stderr.flush()
            last_words.leave(text)
        if self._info.rank == 0:
            time.sleep(_LINGER_BEATS * self._interval_s)
        self._end(EXIT_CODE)

    def _write_stacks(self, why: str) -> None:
        self._stacks.mkdir(parents=True, exist_ok=True)
        with (self._stacks / f"rank_{self._info.rank:05d}.txt").open("w") as stream:
            stream.write(f"{redact_text(why)}\n\nthis rank: {phase.current()}\n\n")
            stream.flush()
            faulthandler.dump_traceback(stream, all_threads=True)


@contextmanager
def watching(
    info: LaunchInfo,
    silence_s: float,
    hang_s: float,
    stacks: Path,
    way_out: CleanupDeadline,
    tell: Callable[[BaseException], None],
) -> Iterator[Heartbeat]:
    """Watch over the job inside (see ``Heartbeat``); a failure is told to the other ranks.

    Raises:
        AlreadyReported: in place of a failure.
    """
    heartbeat = Heartbeat(info, silence_s, hang_s, stacks, way_out, tell)
    with heartbeat.report_failures():
        yield heartbeat
    heartbeat.stop()


def is_consequence(error: BaseException) -> bool:
    """Whether an error only says that another rank has gone."""
    return isinstance(error, dist.DistError) or device.is_transport_error(error)


def _last_step() -> str:
    return f"last completed step: {phase.last_step()}"

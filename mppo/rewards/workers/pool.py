"""Scoring in processes of its own: no response can hold up, end or change the trainer.

The trainer talks to one process (``mppo.rewards.workers.server``), which forks the workers and
kills those that take too long.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from mppo.rewards.judgement import Unscored
from mppo.rewards.workers.server import BATCH, NO_MEMORY, TIMEOUT, UNUSABLE
from mppo.rewards.workers.worker import LENGTH, ScoringTask
from mppo.supervision.phase import tick

START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mppo.rewards.workers.server import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
PASSED_ON = (
    "PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "HOME", "TMPDIR", "PYTHONDONTWRITEBYTECODE",
    "MPLCONFIGDIR",
)  # fmt: skip
"""Environment variables that the processes of a confined task get: no keys of any service."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Result:
    """What became of an item.

    Args:
        happened: one of the words of ``mppo.rewards.workers.server``.
        score: of the item; 0 where there is none.
        text: further numbers as JSON, why there is no score, an exception, or how the process
            ended.
    """

    happened: str
    score: float
    text: str

    @property
    def unscored(self) -> Unscored | None:
        """Where a limit was reached."""
        reason = {TIMEOUT: "timeouts", NO_MEMORY: "failures"}.get(self.happened)
        return Unscored(reason) if reason else None


class WorkerPool:
    """Processes for one task, started when first needed. Any thread may use it, one at a time.

    Args:
        task: what they do.
        workers: at most so many at a time.
        timeout_s: seconds for one item. Where many of the last items have taken too long, each
            gets less: half after as many as there are workers, then a third...
    """

    def __init__(self, task: ScoringTask, workers: int, timeout_s: float) -> None:
        self._task, self._workers, self._timeout_s = task, workers, timeout_s
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._replies: BinaryIO | None = None

    def run(self, items: Sequence[Any]) -> list[Result]:
        """What became of each item.

        Raises:
            RuntimeError: the processes cannot work on this machine, or somebody ended them.
        """
        with self._lock:
            try:
                return self._run(items)
            except BaseException:  # whatever was left half done must not reach the next batch
                self._stop()
                raise

    def _run(self, items: Sequence[Any]) -> list[Result]:
        if self._server is None:
            self._start()
        self._send(BATCH.pack(len(items), self._timeout_s))
        for item in items:
            self._send(_with_length(item))
        results: dict[int, Result] = {}
        while len(results) < len(items):
            assert self._replies is not None
            line = self._replies.readline()
            if not line:
                raise RuntimeError(self._lost())
            place, *result = json.loads(line)
            results[place] = Result(*result)
            if results[place].happened == UNUSABLE:
                raise RuntimeError(f"the process for scores could not start: {results[place].text}")
            tick()
        return [results[place] for place in range(len(items))]

    def _start(self) -> None:
        reading, writing = os.pipe()
        confined = self._task.confined
        environment = {
            name: value for name, value in os.environ.items() if not confined or name in PASSED_ON
        }
        with os.fdopen(writing, "wb"):
            self._server = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    START,
                    json.dumps(sys.path),
                    str(self._workers),
                    str(writing),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL if confined else None,
                pass_fds=(writing,),
                env=environment | (ONE_THREAD if confined else {}),
                start_new_session=True,
            )
        self._replies = os.fdopen(reading, "rb")
        self._ending = weakref.finalize(self, _end, self._server, self._replies)
        self._send(_with_length(self._task))

    def _send(self, content: bytes) -> None:
        assert self._server is not None
        assert self._server.stdin is not None
        try:
            self._server.stdin.write(content)
            self._server.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeError(self._lost()) from error

    def _lost(self) -> str:
        assert self._server is not None
        code = self._server.wait()
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return f"the process that keeps the workers for scores has ended ({how})"

    def _stop(self) -> None:
        if self._server is not None:
            self._ending()
            self._server = self._replies = None


def _end(server: subprocess.Popen[bytes], replies: BinaryIO) -> None:
    """The server ends its workers and itself with its standard input."""
    assert server.stdin is not None
    with suppress(BrokenPipeError):  # it has ended before
        server.stdin.close()
    server.wait()
    replies.close()


def _with_length(value: Any) -> bytes:
    content = pickle.dumps(value)
    return LENGTH.pack(len(content)) + content


def cores() -> int:
    """Processor cores that this rank may count as its own."""
    return max((os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)

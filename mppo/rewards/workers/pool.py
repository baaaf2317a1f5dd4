"""Pool of worker processes for scoring, so that no response can block, end or change the trainer.

The trainer starts one process (``mppo.rewards.workers.worker_server``), which forks the workers and
kills those that exceed the time limit.
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

from mppo.rewards.scores import Unscored
from mppo.rewards.workers.worker import LENGTH, ScoringTask
from mppo.rewards.workers.worker_server import BATCH, NO_MEMORY, TIMEOUT, UNUSABLE
from mppo.supervision.phase import tick

START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mppo.rewards.workers.worker_server import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
KEPT_VARIABLES = (
    "PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "HOME", "TMPDIR", "PYTHONDONTWRITEBYTECODE",
    "MPLCONFIGDIR",
)  # fmt: skip
"""Environment variables of the processes of a confined task: they hold no key of any service."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Result:
    """The result of one item: an outcome of ``mppo.rewards.workers.worker_server``, the score (0 if
    there is none), and further numbers and token rewards as JSON, or why there is no score."""

    outcome: str
    score: float
    text: str

    @property
    def unscored(self) -> Unscored | None:
        """The reason for score 0 if the item exceeded a limit, else None."""
        reason = {TIMEOUT: "timeouts", NO_MEMORY: "failures"}.get(self.outcome)
        return Unscored(reason) if reason else None


class WorkerPool:
    """Worker processes for one task, started at first use. Threads use the pool one at a time. If n
    of the last calls exceeded ``timeout_s`` seconds, the limit is divided by ``1 + n // workers``,
    so that many slow items cannot stop the run."""

    def __init__(self, task: ScoringTask, workers: int, timeout_s: float) -> None:
        self._task, self._workers, self._timeout_s = task, workers, timeout_s
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._replies: BinaryIO | None = None

    def run(self, items: Sequence[Any], per_call: int = 1) -> list[Result]:
        """Run the task on each item, at most ``per_call`` of them at once; RuntimeError if the
        workers cannot start on this machine, or something killed the server."""
        with self._lock:
            try:
                return self._run(items, per_call)
            except BaseException:  # a late reply must not be read as one of the next batch
                self._stop()
                raise

    def _run(self, items: Sequence[Any], per_call: int) -> list[Result]:
        if self._server is None:
            self._start()
        self._send(BATCH.pack(len(items), per_call, self._timeout_s))
        for item in items:
            self._send(_with_length(item))
        results: dict[int, Result] = {}
        while len(results) < len(items):
            assert self._replies is not None
            line = self._replies.readline()
            if not line:
                raise RuntimeError(self._describe_exit())
            place, *result = json.loads(line)
            results[place] = Result(*result)
            if results[place].outcome == UNUSABLE:
                why = results[place].text
                raise RuntimeError(f"a process of reward.* could not start: {why}")
            tick()
        return [results[place] for place in range(len(items))]

    def _start(self) -> None:
        reading, writing = os.pipe()
        confined, numbers = self._task.confined, (str(self._workers), str(writing))
        environment = {
            name: value
            for name, value in os.environ.items()
            if not confined or name in KEPT_VARIABLES
        }
        with os.fdopen(writing, "wb"):
            self._server = subprocess.Popen(
                [sys.executable, "-c", START, json.dumps(sys.path), *numbers],
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
            raise RuntimeError(self._describe_exit()) from error

    def _describe_exit(self) -> str:
        assert self._server is not None
        code = self._server.wait()
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return (
            f"the process that keeps those of reward.* has ended ({how}); resume the run, with a "
            "lower reward.memory_mb if the kernel killed the process for lack of memory"
        )

    def _stop(self) -> None:
        if self._server is not None:
            self._ending()
            self._server = self._replies = None


def _end(server: subprocess.Popen[bytes], replies: BinaryIO) -> None:
    """End the server: it kills its workers and exits when its standard input closes."""
    assert server.stdin is not None
    with suppress(BrokenPipeError):  # the server has already ended
        server.stdin.close()
    server.wait()
    replies.close()


def _with_length(value: Any) -> bytes:
    content = pickle.dumps(value)
    return LENGTH.pack(len(content)) + content


def cores() -> int:
    """The number of processor cores per rank of this node."""
    return max((os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)

"""Server of the reward workers: forks them, distributes items, kills those over the time limit.

``mppo.rewards.workers.pool`` starts the server as a new process (it is not forked). It has one
thread, no device and none of the trainer's descriptors, so it can fork safely. A worker cannot
prevent the server from killing it. The server kills its workers and exits when its standard input
closes, so at the latest when the trainer ends.

Standard input: a pickled ``ScoringTask``, then batches: ``BATCH``, then the items. Task and items
are preceded by their lengths. The descriptor named on the command line gets a line of JSON for each
finished item: its index in the batch, the outcome (a value of ``OUTCOMES``, ``TIMEOUT``, ``DIED``
or ``UNUSABLE``), the score and a text.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from mppo.rewards.workers import worker
from mppo.rewards.workers.worker import LENGTH, RECORD, ScoringTask, read_exactly

BATCH = struct.Struct("<Qd")
"""Number of items, and time limit for one in seconds."""
SCORE, NO_SCORE, RAISED, NO_MEMORY = "score", "no score", "raised", "no memory"
TIMEOUT, DIED, UNUSABLE = "timeout", "died", "unusable"
OUTCOMES = {
    worker.SCORE: SCORE,
    worker.NO_SCORE: NO_SCORE,
    worker.RAISED: RAISED,
    worker.NO_MEMORY: NO_MEMORY,
}
TIMEOUT_WINDOW = 256
"""The number of last items whose time-outs shorten the time limit of the next items."""
_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks that the trainer is alive."""


@dataclass
class Worker:
    """A worker and its current item."""

    pid: int
    requests: int
    records: int
    unsent: bytes = b""
    received: bytes = b""
    ready: bool = False
    item: int | None = None
    since: float = 0.0
    served: int = 0


class WorkerServer:
    """Workers for one task.

    Args:
        task: the function that the workers call.
        workers: most workers at a time.
        replies: descriptor to which the results go.
    """

    def __init__(self, task: ScoringTask, workers: int, replies: int) -> None:
        self._task, self._max_workers, self._replies = task, workers, replies
        self._function = task.load() if task.confined else None
        self._trainer = os.getppid()
        self._workers: list[Worker] = []
        self._timed_out: deque[bool] = deque(maxlen=TIMEOUT_WINDOW)

    def serve(self) -> None:
        """Score batches until standard input ends."""
        while (header := read_exactly(0, BATCH.size)) is not None:
            count, seconds = BATCH.unpack(header)
            items = [item for _ in range(count) if (item := read_item()) is not None]
            if len(items) < count or not self._score(deque(enumerate(items)), seconds):
                return

    def stop(self) -> None:
        """Kill every worker."""
        for one in list(self._workers):
            self._end(one)

    def _score(self, waiting: deque[tuple[int, bytes]], seconds: float) -> bool:
        """Score a batch; return False if the trainer has ended."""
        # a single-threaded loop: hand out, wait for a pipe or the nearest time limit, collect
        while waiting or any(one.item is not None for one in self._workers):
            self._hand_out(waiting)
            busy = [one for one in self._workers if one.item is not None]
            # every time-out shortens the limit, or many slow items together would stop the run
            limit = seconds / (1 + sum(self._timed_out) // self._max_workers)
            now = time.monotonic()
            wait = min([_CHECK_INTERVAL_S, *(one.since + limit - now for one in busy if one.ready)])
            readable, writable, _ = select.select(
                [0, *(one.records for one in busy)],
                [one.requests for one in busy if one.unsent],
                [],
                max(wait, 0.0),
            )
            if 0 in readable or os.getppid() != self._trainer:
                return False  # during a batch, standard input becomes readable only by its end
            for one in busy:
                if one.requests in writable:
                    _write(one)
                if one.records in readable:
                    self._read(one)
                elif one.ready and time.monotonic() > one.since + limit:
                    self._done(one, TIMEOUT)
        return True

    def _hand_out(self, waiting: deque[tuple[int, bytes]]) -> None:
        idle = [one for one in self._workers if one.item is None]
        while waiting and (idle or len(self._workers) < self._max_workers):
            free = idle.pop() if idle else self._fork()
            free.item, free.unsent = waiting.popleft()
            free.since = time.monotonic()

    def _fork(self) -> Worker:
        worker_requests, requests = os.pipe()
        records, worker_records = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            worker.work(self._task, self._function, parent, worker_requests, worker_records)
        os.close(worker_requests)
        os.close(worker_records)
        os.set_blocking(requests, False)  # a worker that does not read must not block the server
        self._workers.append(Worker(pid, requests, records))
        return self._workers[-1]

    def _read(self, one: Worker) -> None:
        part = os.read(one.records, 1 << 16)
        if not part:
            self._done(one, DIED if one.ready else UNUSABLE, _describe_exit(one))
            return
        one.received += part
        while len(one.received) >= RECORD.size:
            kind, score, length = RECORD.unpack_from(one.received)
            end = RECORD.size + length
            if len(one.received) < end:
                break
            text = one.received[RECORD.size : end].decode(errors="replace")
            one.received = one.received[end:]
            if kind == worker.READY and not one.ready:
                one.ready, one.since = True, time.monotonic()
            elif kind in OUTCOMES:
                self._done(one, OUTCOMES[kind] if one.ready else UNUSABLE, text, score)
                return
            else:
                self._done(one, DIED, "it sent an invalid record")
                return

    def _done(self, one: Worker, outcome: str, text: str = "", score: float = 0.0) -> None:
        """Send the result of a worker's item; end the worker unless it can take another item."""
        reply = json.dumps([one.item, outcome, score, text]) + "\n"
        one.item, one.served = None, one.served + 1
        self._timed_out.append(outcome == TIMEOUT)
        # bytes left over in a pipe belong to no item: the next reply could not be trusted
        usable = outcome in (SCORE, NO_SCORE, RAISED) and not one.received and not one.unsent
        if not usable or one.served == self._task.max_items:
            self._end(one)
        content = reply.encode()
        while content:
            content = content[os.write(self._replies, content) :]

    def _end(self, one: Worker) -> None:
        """Kill a worker and the processes it has started."""
        self._workers.remove(one)
        for kill in (os.killpg, os.kill):  # it may not have its own group yet, or may have ended
            with suppress(ProcessLookupError):
                kill(one.pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # _describe_exit has already waited for it
            os.waitpid(one.pid, 0)
        os.close(one.requests)
        os.close(one.records)


def _write(one: Worker) -> None:
    try:
        sent = os.write(one.requests, one.unsent)
    except BlockingIOError:
        return
    except BrokenPipeError:  # the worker has ended; _read sees it too
        sent = len(one.unsent)
    one.unsent = one.unsent[sent:]


def _describe_exit(one: Worker) -> str:
    _, status = os.waitpid(one.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def read_item() -> bytes | None:
    """Read an item with its length prefix; None if standard input ends."""
    length = read_exactly(0, LENGTH.size)
    item = None if length is None else read_exactly(0, *LENGTH.unpack(length))
    return None if length is None or item is None else length + item


def main(workers: int, replies: int) -> None:
    """Serve the trainer until it ends.

    Args:
        workers: most workers at a time.
        replies: descriptor to which the results go.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    task = read_item()
    if task is None:
        sys.exit(0)
    server = WorkerServer(pickle.loads(task[LENGTH.size :]), workers, replies)
    try:
        server.serve()
    finally:
        server.stop()

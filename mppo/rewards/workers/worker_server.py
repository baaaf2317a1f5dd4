"""Server of the reward workers: forks them, distributes items, kills those over the time limit.

``mppo.rewards.workers.pool`` starts the server as a new process (it is not forked). It has one
thread, no device and none of the trainer's descriptors, so it can fork safely. A worker cannot
prevent the server from killing it. The server kills its workers and exits when its standard input
closes, so at the latest when the trainer ends.

Standard input: a pickled ``ScoringTask``, then batches: ``BATCH``, then the items. Task and items
are preceded by their lengths. A worker gets the items of one call at a time. If a call of several
items ends its worker, each of them is called alone, so that only the one at fault has no score. The
descriptor named on the command line gets a line of JSON for each finished item: its index in the
batch, the outcome (a value of ``OUTCOMES``, ``DIED`` or ``UNUSABLE``), the score and a text.
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
from dataclasses import dataclass, field

from mppo.rewards.workers import worker
from mppo.rewards.workers.worker import COUNT, LENGTH, RECORD, TEXT_BYTES, ScoringTask, read_exactly

BATCH = struct.Struct("<QQd")
"""Number of items, most items in one call, and time limit for a call in seconds."""
SCORE, NO_SCORE, RAISED, NO_MEMORY = "score", "no score", "raised", "no memory"
TIMEOUT, DIED, UNUSABLE = "timeout", "died", "unusable"
OUTCOMES = {
    worker.SCORE: SCORE,
    worker.NO_SCORE: NO_SCORE,
    worker.RAISED: RAISED,
    worker.NO_MEMORY: NO_MEMORY,
    worker.TOO_LONG: TIMEOUT,
}
Item = tuple[int, bytes]
"""Index in the batch, and the item with its length."""
TIMEOUT_WINDOW = 256
"""The number of last items whose time-outs shorten the time limit of the next items."""
_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks that the trainer is alive."""


@dataclass
class Worker:
    """A worker and the items of its current call that have no result yet, in their order."""

    pid: int
    requests: int
    records: int
    unsent: bytes = b""
    received: bytearray = field(default_factory=bytearray)
    ready: bool = False
    items: deque[Item] = field(default_factory=deque)
    since: float = 0.0
    served: int = 0

    def take_record(self) -> tuple[bytes, float, str] | None:
        """Remove the first record from what was received; None if it is not complete."""
        if len(self.received) < RECORD.size:
            return None
        kind, score, length = RECORD.unpack_from(self.received)
        end = RECORD.size + length
        if length > TEXT_BYTES:
            return b"?", 0.0, ""
        if len(self.received) < end:
            return None
        text = self.received[RECORD.size : end].decode(errors="replace")
        del self.received[:end]
        return kind, score, text


class WorkerServer:
    """Workers for one task, whose results go to the descriptor ``replies``."""

    def __init__(self, task: ScoringTask, workers: int, replies: int) -> None:
        self._task, self._max_workers, self._replies = task, workers, replies
        self._function = task.load() if task.confined else None
        self._trainer = os.getppid()
        self._workers: list[Worker] = []
        self._timed_out: deque[bool] = deque(maxlen=TIMEOUT_WINDOW)
        self._waiting: deque[list[Item]] = deque()

    def serve(self) -> None:
        """Score batches until standard input ends."""
        while (header := read_exactly(0, BATCH.size)) is not None:
            count, per_call, seconds = BATCH.unpack(header)
            items = [item for _ in range(count) if (item := read_item()) is not None]
            numbered = list(enumerate(items))
            calls = (numbered[start : start + per_call] for start in range(0, count, per_call))
            self._waiting = deque(calls)
            if len(items) < count or not self._score(seconds):
                return

    def stop(self) -> None:
        for one in list(self._workers):
            self._end(one)

    def _score(self, seconds: float) -> bool:
        """Score the calls that wait; return False if the trainer has ended."""
        # a single-threaded loop: hand out, wait for a pipe or the nearest time limit, collect
        while self._waiting or any(one.items for one in self._workers):
            self._hand_out()
            busy = [one for one in self._workers if one.items]
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
                    self._fail(one, TIMEOUT)
        return True

    def _hand_out(self) -> None:
        idle = [one for one in self._workers if not one.items]
        while self._waiting and (idle or len(self._workers) < self._max_workers):
            free = idle.pop() if idle else self._fork()
            free.items = deque(self._waiting.popleft())
            contents = (content for _, content in free.items)
            free.unsent = COUNT.pack(len(free.items)) + b"".join(contents)
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
            self._fail(one, DIED if one.ready else UNUSABLE, _describe_exit(one))
            return
        one.received += part
        while one.items and (record := one.take_record()) is not None:
            kind, score, text = record
            if kind == worker.READY and not one.ready:
                one.ready, one.since = True, time.monotonic()
            elif kind not in OUTCOMES:
                self._fail(one, DIED, "it sent an invalid record")
            elif not one.ready:
                self._fail(one, UNUSABLE, text)
            elif kind == worker.NO_MEMORY:
                self._fail(one, NO_MEMORY)
            else:
                self._done(one, OUTCOMES[kind], text, score)

    def _done(self, one: Worker, outcome: str, text: str, score: float) -> None:
        """Report a worker's next item; after its call, end it if it cannot take another one."""
        self._report(one.items.popleft(), outcome, text, score)
        one.since, one.served = time.monotonic(), one.served + 1
        most = self._task.max_items
        replaced = most is not None and one.served >= most
        # bytes left over in a pipe belong to no item: the next reply could not be trusted
        if not one.items and (replaced or one.received or one.unsent):
            self._end(one)

    def _fail(self, one: Worker, outcome: str, text: str = "") -> None:
        """End a worker. Its item has no score; several items are then called one by one."""
        items, one.items = one.items, deque()
        self._end(one)
        if len(items) == 1 or outcome == UNUSABLE:
            self._report(items[0], outcome, text, 0.0)
        else:
            self._waiting.extendleft([item] for item in reversed(items))
            self._timed_out.append(outcome == TIMEOUT)

    def _report(self, item: Item, outcome: str, text: str, score: float) -> None:
        self._timed_out.append(outcome == TIMEOUT)
        content = (json.dumps([item[0], outcome, score, text]) + "\n").encode()
        while content:
            content = content[os.write(self._replies, content) :]

    def _end(self, one: Worker) -> None:
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
    """Serve the trainer until it ends."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    task = read_item()
    if task is None:
        sys.exit(0)
    server = WorkerServer(pickle.loads(task[LENGTH.size :]), workers, replies)
    try:
        server.serve()
    finally:
        server.stop()

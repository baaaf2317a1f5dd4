"""A process that scores responses call by call; ``mppo.rewards.workers.worker_server`` forks it.

It reads calls from one pipe, each with the number of its items, and writes a record for each item
to another, in the same order: a kind, a number and a text of at most ``TEXT_BYTES``.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mppo.rewards.result import NoScore, read_result
from mppo.rewards.workers.confinement import (
    close_files,
    die_first,
    die_with_parent,
    drop_privileges,
    limit,
)

READY, SCORE, NO_SCORE, RAISED, NO_MEMORY, TOO_LONG = b"r", b"s", b"n", b"e", b"m", b"t"
"""Kinds of records. The worker sends READY once, before the first item. Per item it sends SCORE
with further numbers and token rewards as JSON, NO_SCORE with the reason, RAISED with the function's
exception, or TOO_LONG. NO_MEMORY ends the worker."""
RECORD = struct.Struct("<cdI")
LENGTH = COUNT = struct.Struct("<Q")
TEXT_BYTES = 1 << 24
"""Token rewards of a response of half a million tokens fit."""
ERROR_CHARACTERS = 2000
OWN_FOLDER = os.path.dirname(__file__)

Function = Callable[[Sequence[Any]], Iterable[Any]]
"""Returns a result for each item of a call, in order; one may be an exception, which is its own
item's alone."""


class TooLong(Exception):
    """A function's own time limit for an item has passed."""


@dataclass(frozen=True)
class ScoringTask:
    """The task of the workers of a pool. ``loader``, a ``module:function`` called with
    ``arguments``, returns the function that scores the items of a call. If that may execute text of
    the model, its worker is ``confined`` and can only read files and compute; the function is then
    loaded once, in the server, before the fork. ``memory_mb`` limits a worker's address space in
    MiB; a worker is replaced after ``max_items`` items."""

    loader: str
    arguments: tuple[Any, ...] = ()
    confined: bool = False
    memory_mb: int | None = None
    max_items: int | None = None

    def load(self) -> Function:
        """Import and return the function that scores the items of a call."""
        module, _, name = self.loader.partition(":")
        return getattr(importlib.import_module(module), name)(*self.arguments)


def work(
    task: ScoringTask, function: Function | None, parent: int, requests: int, records: int
) -> None:
    """Score items until ``requests`` ends, for the parent process (its pid); never returns. The
    server has loaded ``function`` for a confined task; ``requests`` and ``records`` are descriptors
    to read from and to write to."""
    try:
        _prepare(task, parent, requests, records)
        function = function or task.load()
        _send(records, READY, 0.0, "")
        while (count := read_exactly(requests, COUNT.size)) is not None:
            items = [_read_item(requests) for _ in range(*COUNT.unpack(count))]
            for record in _answer(function, items):
                _send(records, *record)
                if record[0] == NO_MEMORY:
                    return
    except BaseException as error:  # without READY, the server reports it as UNUSABLE
        _send(records, RAISED, 0.0, f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


def _prepare(task: ScoringTask, parent: int, requests: int, records: int) -> None:
    os.setsid()  # a kill of the group reaches the processes that a user's function starts
    devnull = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2) if task.confined else (0,):
        os.dup2(devnull, standard)
    close_files({requests, records})
    linux = sys.platform == "linux"
    if linux:
        die_with_parent(parent)
        die_first()
    if task.memory_mb is not None:
        limit({"AS": task.memory_mb << 20})
    if task.confined:
        limit({"CORE": 0, "FSIZE": 0})
        if linux:
            drop_privileges()


def _read_item(requests: int) -> Any:
    length = read_exactly(requests, LENGTH.size)
    content = None if length is None else read_exactly(requests, *LENGTH.unpack(length))
    if content is None:
        os._exit(0)  # the server has ended
    return pickle.loads(content)


def _answer(function: Function, items: Sequence[Any]) -> Iterator[tuple[bytes, float, str]]:
    """Make the record of each item; items whose call raised are called one by one."""
    try:
        results = list(function(items))
        if len(results) != len(items):
            raise NoScore(f"is missing: {len(results)} results came for {len(items)} responses")
    except BaseException as error:  # a user's function may raise SystemExit
        if len(items) > 1 and not isinstance(error, MemoryError | NoScore):
            for item in items:
                yield from _answer(function, [item])
            return
        results = [error] * len(items)
    finally:
        sys.stdout.flush()
    yield from map(_record, results)


def _record(result: Any) -> tuple[bytes, float, str]:
    try:
        if isinstance(result, BaseException):
            raise result
        found = read_result(result)
        text = json.dumps([found.numbers, found.token_rewards, found.answer])
        if len(text) > TEXT_BYTES:
            raise NoScore(f"has further values beside it, which exceed {TEXT_BYTES} bytes")
        return SCORE, found.score, text
    except NoScore as why:
        return NO_SCORE, 0.0, str(why)[:ERROR_CHARACTERS]
    except MemoryError:
        return NO_MEMORY, 0.0, ""
    except TooLong:
        return TOO_LONG, 0.0, ""
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS] + _place(error)
        return RAISED, 0.0, text


def _place(error: BaseException) -> str:
    """Name the last line of the function's own file on the stack, also if a library raised."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if os.path.dirname(frame.filename) != OWN_FOLDER]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({own[-1].filename} line {own[-1].lineno})" if own else ""


def _send(records: int, kind: bytes, number: float, text: str) -> None:
    content = text.encode(errors="replace")[:TEXT_BYTES]
    content = RECORD.pack(kind, number, len(content)) + content
    while content:
        content = content[os.write(records, content) :]


def read_exactly(descriptor: int, size: int) -> bytes | None:
    """Read ``size`` bytes; None if the pipe ends before."""
    parts = []
    while size:
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)

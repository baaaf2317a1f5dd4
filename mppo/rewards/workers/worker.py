"""A process that scores responses, one after the other; ``mppo.rewards.workers.server`` forks it.

It reads responses from one pipe and writes a record for each to another: a kind, a number and a
text of at most ``TEXT_BYTES``.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mppo.rewards.result import read_result
from mppo.rewards.workers.confinement import (
    close_files,
    die_first,
    die_with_parent,
    limit,
    renounce,
)

READY, SCORE, NO_SCORE, RAISED, NO_MEMORY = b"r", b"s", b"n", b"e", b"m"
"""Kinds of records: once before the first item; then the score, with further numbers as JSON; why
the result holds none; the exception that the function raised; or that it ran out of memory."""
RECORD = struct.Struct("<cdH")
LENGTH = struct.Struct("<Q")
TEXT_BYTES = (1 << 16) - 1
ERROR_CHARACTERS = 2000
OWN_FOLDER = os.path.dirname(__file__)

Function = Callable[[Any], Any]


@dataclass(frozen=True)
class ScoringTask:
    """What the workers of a pool do.

    Args:
        loader: ``module:function`` that gives the function of an item, called with ``arguments``.
        arguments: as above.
        confined: the function hands text of the model to code that may do anything with it: the
            worker may read files and compute, and nothing else. It is loaded once, and forked.
        memory_mb: address space of a worker, None without a limit.
        serves: items after which a worker gives way to a fresh one, None for any number.
    """

    loader: str
    arguments: tuple[Any, ...] = ()
    confined: bool = False
    memory_mb: int | None = None
    serves: int | None = None

    def load(self) -> Function:
        """The function that gives an item's score."""
        module, _, name = self.loader.partition(":")
        return getattr(importlib.import_module(module), name)(*self.arguments)


def work(
    task: ScoringTask, function: Function | None, parent: int, requests: int, records: int
) -> None:
    """Score until ``requests`` ends; never returns.

    Args:
        task: what to do.
        function: of a confined task, which is loaded already.
        parent: process that forked this one.
        requests, records: descriptors to read from and to write to.
    """
    try:
        _prepare(task, parent, requests, records)
        function = function or task.load()
        _send(records, READY, 0.0, "")
        while (item := read_exactly(requests, LENGTH.size)) is not None:
            item = read_exactly(requests, *LENGTH.unpack(item))
            if item is None:
                break
            record = _answer(function, pickle.loads(item))
            _send(records, *record)
            if record[0] == NO_MEMORY:
                break
    except BaseException as error:  # before it is ready, this says why it cannot be
        _send(records, RAISED, 0.0, f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


def _prepare(task: ScoringTask, parent: int, requests: int, records: int) -> None:
    os.setsid()  # a kill reaches what a user's function starts
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2) if task.confined else (0,):
        os.dup2(nowhere, standard)
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
            renounce()


def _answer(function: Function, item: Any) -> tuple[bytes, float, str]:
    try:
        result = function(item)
        try:
            score, numbers = read_result(result)
        except ValueError as why:
            return NO_SCORE, 0.0, str(why)[:ERROR_CHARACTERS]
        text = json.dumps(numbers)
        if len(text) > TEXT_BYTES:
            return NO_SCORE, 0.0, f"comes with {len(numbers)} further numbers, which are too many"
        return SCORE, score, text
    except MemoryError:
        return NO_MEMORY, 0.0, ""
    except BaseException as error:  # a user's function may leave with SystemExit
        return RAISED, 0.0, f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS] + _place(error)
    finally:
        sys.stdout.flush()


def _place(error: BaseException) -> str:
    """Where in the function's own file it failed, however deep in a library that was."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if os.path.dirname(frame.filename) != OWN_FOLDER]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({own[-1].filename} line {own[-1].lineno})" if own else ""


def _send(records: int, kind: bytes, number: float, text: str) -> None:
    content = text.encode(errors="replace")[:TEXT_BYTES]
    os.write(records, RECORD.pack(kind, number, len(content)) + content)


def read_exactly(descriptor: int, size: int) -> bytes | None:
    """``size`` bytes, or None where the pipe ends before."""
    parts = []
    while size:
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)

"""Run a function in a process of its own, forked from this one with its imported modules."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

A = TypeVar("A")
R = TypeVar("R")


class SimulationError(RuntimeError):
    """The simulated code failed, as it would on a GPU.

    Args:
        what: phase and error in one line.
        stack: Python's traceback.
    """

    def __init__(self, what: str, stack: str) -> None:
        super().__init__(what)
        self.stack = stack


def isolated(function: Callable[..., R], *arguments: Any) -> R:
    """Call a function in a forked process and return its result.

    The function's changes to its process, such as patches of torch, do not affect this process.

    Raises:
        SimulationError: the function raised an error, its result cannot be pickled, or its process
            was killed.
    """
    return _result(*_started(function, arguments))


def isolated_each(function: Callable[[A], R], cases: Sequence[A], at_once: int) -> Iterator[R]:
    """Call a function for several cases, each in a forked process, and yield the results in order.

    Raises:
        SimulationError: as ``isolated``, for the first case that fails.
    """
    running: deque[tuple[Any, Any]] = deque()
    waiting = deque(cases)
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(_started(function, (waiting.popleft(),)))
        yield _result(*running.popleft())


def _started(function: Callable[..., Any], arguments: tuple) -> tuple[Any, Any]:
    """Start a process; return it and the end of its pipe."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    process = context.Process(
        target=_run, args=(sender, receiver, function, arguments), daemon=True
    )
    process.start()
    sender.close()
    return process, receiver


def _result(process: Any, receiver: Any) -> Any:
    try:
        value, error = receiver.recv()
    except EOFError:
        process.join()
        why = f"the simulating process ended with code {process.exitcode}"
        raise SimulationError(f"{why}; too little memory on this machine?", "") from None
    except Exception as problem:
        what = f"the result cannot be unpickled, {problem}"
        value, error = None, (what, "".join(traceback.format_exception(problem)))
    process.join()
    if error is not None:
        raise SimulationError(*error)
    return value


def _pickled(value: Any) -> Any:
    try:
        return ForkingPickler.dumps((value, None))
    except Exception as error:
        raise TypeError(f"the result cannot be pickled, {error}") from error


def _run(sender: Any, receiver: Any, function: Callable[..., Any], arguments: tuple) -> None:
    receiver.close()  # else an answer that nobody reads would wait for this process itself
    gc.freeze()  # the caller's modules: collections would visit and copy them
    try:
        answer = _pickled(function(*arguments))
    except BaseException as error:  # the calling process reports all errors
        from mppo.supervision.phase import current

        what = f"while {current()}: {type(error).__name__}: {error}"
        answer = ForkingPickler.dumps((None, (what, "".join(traceback.format_exception(error)))))
    with suppress(BrokenPipeError):  # the calling process has ended
        sender.send_bytes(answer)
    sender.close()
    sys.stdout.flush()
    os._exit(0)  # torch's own exit handlers would look for the GPU's driver

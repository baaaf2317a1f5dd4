"""The phase this rank is in, for error messages and heartbeats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mppo.supervision.stop_request import StepInterrupted

_stack: list[str] = []
_failed_in: list[str] = []
_counts = {"progress": 0, "last_step": 0}


@contextmanager
def phase(name: str, step: int | None = None) -> Iterator[None]:
    """Name the phase inside; the names of nested phases are joined, outermost first."""
    _stack.append(name if step is None else f"{name}, step {step}")
    tick()
    try:
        yield
    except StepInterrupted:
        raise
    except BaseException:  # record the innermost phase, in which the failure began
        if not _failed_in:
            _failed_in.extend(_stack)
        raise
    finally:
        _stack.pop()
        tick()


def begin() -> None:
    """Forget an earlier run of this process: a notebook may start several."""
    _failed_in.clear()


def current() -> str:
    return " > ".join(_failed_in or _stack) or "start"


def tick() -> None:
    """Count progress: a phase, a micro-batch or a token."""
    _counts["progress"] += 1


def progress() -> int:
    return _counts["progress"]


def step_done(step: int) -> None:
    _counts["last_step"] = step


def last_step() -> int:
    return _counts["last_step"]

"""What this rank is doing, so that a failure, and the heartbeat, can say so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mppo.supervision.stop_request import StepInterrupted

_stack: list[str] = []
_failed_in: list[str] = []
_counts = {"progress": 0, "last_step": 0}


@contextmanager
def phase(name: str, step: int | None = None) -> Iterator[None]:
    """Name what the rank does inside; nested phases join, outermost first."""
    _stack.append(name if step is None else f"{name}, step {step}")
    tick()
    try:
        yield
    except StepInterrupted:
        raise
    except BaseException:  # noted only, whatever it is: the innermost phase is the one it began in
        if not _failed_in:
            _failed_in.extend(_stack)
        raise
    finally:
        _stack.pop()
        tick()


def current() -> str:
    """The phase this rank is in, or the one it failed in."""
    return " > ".join(_failed_in or _stack) or "start"


def tick() -> None:
    """Something went on: a phase, a micro-batch, a token."""
    _counts["progress"] += 1


def progress() -> int:
    """How many ticks there were."""
    return _counts["progress"]


def step_done(step: int) -> None:
    """Remember the last completed PPO step."""
    _counts["last_step"] = step


def last_step() -> int:
    """The last completed PPO step, 0 before the first."""
    return _counts["last_step"]

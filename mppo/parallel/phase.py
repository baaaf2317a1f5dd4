"""What this rank is doing, so that a failure can say so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_stack: list[str] = []
_failed_in: list[str] = []


@contextmanager
def phase(name: str, step: int | None = None) -> Iterator[None]:
    """Name what the rank does inside; nested phases join, outermost first."""
    _stack.append(name if step is None else f"{name}, step {step}")
    try:
        yield
    except BaseException:
        if not _failed_in:
            _failed_in.extend(_stack)
        raise
    finally:
        _stack.pop()


def current() -> str:
    """The phase this rank is in, or the one it failed in."""
    return " > ".join(_failed_in or _stack) or "start"

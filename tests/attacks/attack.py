"""One hostile input and the expected result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def nothing(folder: Path) -> None:
    """The input needs no file."""


@dataclass(frozen=True)
class Attack:
    """One hostile input and the expected result.

    ``prepare`` and ``run`` are called in two processes of their own, with the same empty folder as
    argument and as working directory. Around it lie files that must stay as they are.

    Args:
        given: the input, as the table in the docs names it.
        run: gives the input to mppo and returns the exit code, as the ``main`` of a program does.
            What it prints is the output. An exception that leaves it is a failure of the test.
        says: text that the output must contain.
        code: the exit code.
        within_s: seconds after which it must have ended, interpreter already started.
        prepare: makes the input's files.
        writes: patterns, relative to the folder, of files that may be new or changed afterwards.
    """

    given: str
    run: Callable[[Path], int]
    says: str
    code: int = 2
    within_s: float = 20.0
    prepare: Callable[[Path], None] = nothing
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """The attacks on one part of mppo.

    Args:
        title: heading in the docs.
        defence: what mppo does against them, one or two sentences.
        attacks: the rows.
    """

    title: str
    defence: str
    attacks: tuple[Attack, ...]

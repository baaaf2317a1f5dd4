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

    ``prepare`` and ``run`` are called in separate processes, with the same empty folder as argument
    and as working directory. Files around this folder must not change.

    Args:
        given: description of the input, for the table in the docs.
        run: gives the input to mppo and returns the exit code, as the ``main`` of a program does.
            What it prints is the output. If it raises, the test fails.
        says: text that the output must contain.
        code: the exit code.
        within_s: time limit in seconds, without the start of the interpreter.
        prepare: makes the input's files.
        writes: patterns, relative to the folder, of files that may be new or changed afterwards.
        by_user: what refuses the input, a limit of the kernel or a file's owner, treats root and
            other users differently: root runs the row as both.
    """

    given: str
    run: Callable[[Path], int]
    says: str
    code: int = 2
    within_s: float = 20.0
    prepare: Callable[[Path], None] = nothing
    writes: tuple[str, ...] = ()
    by_user: bool = False


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

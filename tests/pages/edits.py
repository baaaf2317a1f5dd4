"""The changes that a page shows to the code, applied in the page's folder."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from pages.blocks import ROOT

_FILE = re.compile(r"--- a/(\S+)\n\+\+\+ b/\1\n")
_HUNK = re.compile(r"^@@.*\n", re.MULTILINE)


def apply_diff(folder: Path, text: str) -> None:
    """Apply a block of the language "diff".

    Args:
        folder: the page's.
        text: for each file its two lines, then hunks that start with ``@@`` alone: lines of
            context, removed lines and added ones.

    Raises:
        ValueError: the lines of a hunk occur in the file not exactly once.
    """
    _, *parts = _FILE.split(text + "\n")
    if not parts:
        raise ValueError("no file is named: --- a/FILE, +++ b/FILE")
    for name, hunks in zip(parts[::2], parts[1::2], strict=True):
        file = _own_copy(folder, name)
        content = file.read_text()
        for hunk in _HUNK.split(hunks)[1:]:
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if not line.startswith("+"))
            new = "".join(line[1:] for line in lines if not line.startswith("-"))
            if content.count(old) != 1:
                raise ValueError(f"{name} has these lines {content.count(old)} times:\n{old}")
            content = content.replace(old, new)
        file.write_text(content)


def _own_copy(folder: Path, name: str) -> Path:
    """The file in a copy of its package, or alone, instead of the repository's."""
    top = folder / Path(name).parts[0]
    if top.is_symlink():
        top.unlink()
        shutil.copytree(ROOT / top.name, top)  # with the bytecode of files that stay equal
    file = folder / name
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, file)
    return file


def fresh_python(folder: Path) -> dict[str, str]:
    """Variables with which commands of a page use a new interpreter with its changed code."""
    path = [folder, folder / "tests/support", ROOT / "tests/support", ROOT / "tests/distributed"]
    return {"PAGE_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(map(str, path))}

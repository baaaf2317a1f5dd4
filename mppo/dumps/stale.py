"""Marks on dumps of lost work: of steps that a run did after the checkpoint it resumed from.

A run that died at step 7 and resumes from step 5 trains step 6 again. Until it has, the dump of the
first ``step_6`` lies in the run folder. The file ``STALE`` in the dump's folder marks it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from mppo.safety.disk import replace_text
from mppo.safety.input_files import read_text

STALE = "STALE"
_LIMIT = 1 << 10
"""Most bytes of a mark."""


def step_folders(parent: Path) -> dict[int, Path]:
    """The folders ``step_N`` in a folder, complete or not, by step."""
    entries = parent.iterdir() if parent.is_dir() else ()
    return {
        int(match[1]): entry
        for entry in entries
        if (match := re.fullmatch(r"step_([0-9]+)", entry.name)) and entry.is_dir()
    }


def mark_stale(parent: Path, done: int) -> dict[int, Path]:
    """Mark the folders of the steps after ``done``, the step that a run starts again from; return
    all marked folders by step, with those of earlier starts."""
    found, start = step_folders(parent), f"again from step {done}" if done else "anew"
    for step, folder in found.items():
        if step > done:
            replace_text(folder / STALE, f"written before the run started {start}\n")
    return {step: folder for step, folder in found.items() if (folder / STALE).exists()}


def stale_reason(folder: Path) -> str | None:
    """When a step's folder was written, if it is of lost work; None if it is not."""
    try:
        return " ".join(read_text(folder / STALE, _LIMIT).split()) or "marked without a reason"
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"marked, but {folder / STALE} cannot be read ({error})"


def remove_stale(folders: Collection[Path]) -> None:
    """Delete the folders that are still marked: the run has passed their steps."""
    for folder in folders:
        if not (folder / STALE).exists():
            continue
        # under another name: half deleted, without the mark, it would count as a valid dump
        gone = folder.with_name(f".{folder.name}.deleted")
        shutil.rmtree(gone, ignore_errors=True)
        with suppress(OSError):  # it stays marked
            folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

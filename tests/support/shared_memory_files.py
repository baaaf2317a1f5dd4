"""Files in shared memory that programs leave behind."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

import psutil

FOLDER = "/dev/shm"
PATIENCE_S = 120.0


def shared_files() -> set[str]:
    """The names of the files in shared memory."""
    return set(os.listdir(FOLDER))


def check_nothing_is_left(before: set[str]) -> None:
    """Fail if files stay in shared memory that no process uses.

    Args:
        before: of ``shared_files``, from the beginning of the test.
    """
    deadline = time.monotonic() + PATIENCE_S  # other programs may be creating theirs
    while left := _without_owner(shared_files() - before):
        assert time.monotonic() < deadline, f"left in shared memory: {left}"
        time.sleep(0.5)


def _without_owner(names: set[str]) -> set[str]:
    """Those files that no process has mapped or opened."""
    used: set[str] = set()
    for process in psutil.process_iter() if names else ():
        with suppress(psutil.Error, OSError):
            used |= {Path(one.path).name for one in process.memory_maps()}
            used |= {Path(one.path).name for one in process.open_files()}
    return {name for name in names - used if not _is_of_another_test(name)}


def _is_of_another_test(name: str) -> bool:
    """Whether a file is of an SGLang server, which no test here starts, or of a living process that
    is about to share a tensor; other tests run at the same time."""
    owner = re.fullmatch(r"torch_(\d+)_\d+_\d+", name)
    return name.startswith("sglang_") or (owner is not None and psutil.pid_exists(int(owner[1])))

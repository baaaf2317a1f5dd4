"""Permissions of a run's files: for its user alone, or also for the group of a shared folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PRIVATE = 0o077
"""The umask that denies group and others all access."""


@contextmanager
def private_files(folder: Path) -> Iterator[None]:
    """Make the files of this process and its servers private (0700 and 0600) inside the context.

    An existing folder with the set-group-ID bit is shared: its group gets the same access to files
    as to the folder (``chmod 2750``: read, ``2770``: read and write). Other users never get access.
    """
    before = os.umask(_umask(folder))
    try:
        yield
    finally:
        os.umask(before)


def _umask(folder: Path) -> int:
    try:
        mode = folder.stat().st_mode
    except OSError:  # does not exist yet
        return PRIVATE
    return PRIVATE & ~(mode & stat.S_IRWXG) if mode & stat.S_ISGID else PRIVATE

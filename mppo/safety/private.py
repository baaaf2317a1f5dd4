"""What a run writes is for its user alone, unless its folder is shared with a group on purpose."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PRIVATE = 0o077
"""The umask that leaves nothing to others."""


@contextmanager
def private_files(folder: Path) -> Iterator[None]:
    """Folders and files that this process and its servers make inside are private (0700 and 0600).

    A folder that is there already, with the set-group-ID bit, is shared: its group gets in files
    what it has in the folder (``chmod 2750``: may read, ``2770``: may write as well). Other users
    get nothing in either case.

    Args:
        folder: the run's.
    """
    before = os.umask(_umask(folder))
    try:
        yield
    finally:
        os.umask(before)


def _umask(folder: Path) -> int:
    try:
        mode = folder.stat().st_mode
    except OSError:  # not there yet
        return PRIVATE
    return PRIVATE & ~(mode & stat.S_IRWXG) if mode & stat.S_ISGID else PRIVATE

"""A pickle that runs code, for tests that files from elsewhere are read without unpickling."""

from __future__ import annotations

import os
import pickle
from pathlib import Path


class MaliciousPickle:
    """An object whose unpickling creates the folder ``mark``."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def add_malicious_pickle(table: Path, mark: Path) -> None:
    """Add a pickle that creates the folder ``mark`` to a checkpoint's table of contents."""
    contents = pickle.loads(table.read_bytes())
    contents.planner_data = MaliciousPickle(mark)
    table.write_bytes(pickle.dumps(contents))

"""Code inside a pickle, for tests that what comes from elsewhere is read without running it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path


class Deed:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def bring_a_deed(table: Path, mark: Path) -> None:
    """Put into a checkpoint's table of contents what makes a folder ``mark``."""
    contents = pickle.loads(table.read_bytes())
    contents.planner_data = Deed(mark)
    table.write_bytes(pickle.dumps(contents))

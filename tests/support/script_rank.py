"""A user's script as a launcher's rank, in a process that has imported the libraries."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Execute a script in its folder, as ``python`` does; ``argv`` is the script and its
    arguments."""
    sys.argv = list(argv)
    folder = Path(argv[0]).parent
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    runpy.run_path(argv[0], run_name="__main__")
    return 0

"""mppo as an installation that brings plugins of torchrun, or as a folder that brings none."""

from __future__ import annotations

import re
from pathlib import Path

GROUP = "torchrun.handlers"


def installed(folder: Path, with_plugins: bool = True) -> str:
    """The value of PYTHONPATH for processes that shall find mppo and its plugins of torchrun.

    Args:
        folder: where to describe an installation; it stands before the environment's own.
        with_plugins: whether it has the plugins of ``pyproject.toml``.
    """
    root = Path(__file__).parents[2]
    described = folder / "mppo-0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: mppo\nVersion: 0\n")
    table = rf'^\[project\.entry-points\."{re.escape(GROUP)}"\]\n((?:\w+ = .*\n)+)'
    found = re.search(table, (root / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    plugins = f"[{GROUP}]\n{found[1]}" if with_plugins else ""
    (described / "entry_points.txt").write_text(plugins.replace('"', ""))
    return f"{folder}:{root}"

"""``python tests/support/constraints.py`` prints ``constraints.txt``: the versions, in this
environment, of all that mppo with the extras of ``EXTRAS`` needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
EXTRAS = (
    "cpu", "agents", "rewards", "parquet", "plan", "tensorboard", "wandb", "mlflow", "swanlab",
    "mpi",
)  # fmt: skip
HEAD = """\
# The versions that the tests run with, on Linux with Python 3.11:
# pip install -c constraints.txt "mppo[cpu]". Written by `make constraints`.
"""


def requirements_of(extras: Sequence[str]) -> list[str]:
    """The requirements of mppo with some extras, in ``pyproject.toml``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(each for name in extras for each in optional[name])]


def pinned_versions(requirements: Sequence[str]) -> dict[str, str]:
    """Version of each installed package that the requirements need, directly or not.

    Args:
        requirements: such as ``numpy>=2``; packages that are not installed are left out.
    """
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(each), "") for each in requirements]
    while waiting:
        requirement, wanted = waiting.pop()
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"extra": wanted}):
            continue
        name = canonicalize_name(requirement.name)
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        found[name] = package.version.partition("+")[0]  # without the build, such as +cpu
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += [(Requirement(each), extra) for each in package.requires or ()]
    return found


if __name__ == "__main__":
    found = pinned_versions(requirements_of(EXTRAS))
    print(HEAD + "".join(f"{name}=={found[name]}\n" for name in sorted(found)), end="")

"""Import of the user's reward function by its name."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def import_function(name: str) -> Any:
    """Import ``module:function`` or ``path.py:function``; None if the module lacks the name.

    Raises:
        Exception: any exception of the module's own code.
    """
    where, _, attribute = name.rpartition(":")
    module = _import_file(where) if where.endswith(".py") else importlib.import_module(where)
    return getattr(module, attribute, None)


def load_in_worker(
    name: str, kwargs: Mapping[str, Any]
) -> Callable[[tuple[str, str, str, dict[str, Any]]], Any]:
    """Return the function as one of (data source, response, ground truth, extra info)."""
    function = import_function(name)

    def score(item: tuple[str, str, str, dict[str, Any]]) -> Any:
        names = ("data_source", "solution_str", "ground_truth", "extra_info")
        return function(**dict(zip(names, item)), **kwargs)

    return score


def _import_file(path: str) -> Any:
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {file}")
    spec = importlib.util.spec_from_file_location(f"mppo_reward_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

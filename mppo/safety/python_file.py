"""Python files of the user: their import, and where an exception in them was raised."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

_OWN = str(Path(__file__).parents[1])


def import_file(path: str | Path, name: str) -> ModuleType:
    """Execute a file (``~`` is expanded) as a module; it can import the modules beside it, after
    installed ones. Raises FileNotFoundError, and any exception of the file's code."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {file}")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def describe_error(error: BaseException) -> str:
    """Type and message of an exception, and the last line of the user's code on its way."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OWN, "<frozen")) and "-packages" not in frame.filename
    ]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"

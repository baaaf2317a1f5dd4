"""The code that a recipe names (rewards, agents, tools, plugins), kept in the run folder."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mppo.report.files import CODE
from mppo.safety.disk import replace_text
from mppo.safety.input_files import read_text
from mppo.safety.redact import redact_text

_LIMIT = 1 << 20
"""Most bytes of a file that is kept."""
_FILE = re.compile(r"(.+\.py)(?::[\w.]+)?")
_NAME = re.compile(r"([A-Za-z_][\w.]*):[\w.]+")
_NAMED = ("function", "path", "run")
"""Keys whose values may be ``module:name``."""
_OWN = Path(__file__).parents[1]


def keep_code(folder: Path, recipe: Mapping[str, Any], done: int) -> list[str]:
    """Copy the files into ``code/<key>/``, with secrets replaced; return the keys whose code has
    changed since the last start. The earlier copy is then renamed to ``<file>.until_step_<done>``
    (PPO steps that are done). OSError: a copy cannot be written."""
    changed = []
    for key, path in _code_paths(recipe):
        try:
            text = redact_text(read_text(path, _LIMIT))
        except (OSError, ValueError):  # whoever runs the code says what is wrong with the file
            continue
        copy = folder / CODE / key / path.name
        if copy.is_file():
            if copy.read_text() == text:
                continue
            copy.replace(copy.with_name(f"{path.name}.until_step_{done}"))
            changed.append(key)
        copy.parent.mkdir(parents=True, exist_ok=True)
        replace_text(copy, text)
    return changed


def kept_code(folder: Path) -> dict[str, str]:
    """The kept files of a run's last start: key and file name, and text."""
    found = {}
    for path in sorted((folder / CODE).glob("*/*.py")):
        try:
            found[f"{path.parent.name}: {path.name}"] = redact_text(read_text(path, _LIMIT))
        except (OSError, ValueError):
            continue
    return found


def _code_paths(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Key and file of each file of code outside mppo that the recipe names."""
    for key, text in _texts(recipe, ""):
        name = re.sub(r"\.\d+", "", key).rpartition(".")[2]
        words = [text]
        if name == "command":
            try:
                words = shlex.split(text)
            except ValueError:
                continue
        for word in words:
            path = None
            if match := _FILE.fullmatch(word):
                path = Path(match[1]).expanduser()
            elif name in _NAMED and (match := _NAME.fullmatch(word)):
                path = _module_file(match[1])
            if path is not None and path.is_file() and _OWN not in path.resolve().parents:
                yield key, path


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Dotted keys and values of all texts in plain values; entries of lists have their number."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if re.fullmatch(r"[\w-]+", str(name)):  # it becomes part of a folder's name
                yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{key}.{number}")


def _module_file(name: str) -> Path | None:
    """The file of a module, which is not imported for it."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if module is None and "." not in name:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        file = spec.origin if spec is not None and spec.has_location else None
    return Path(file) if file else None

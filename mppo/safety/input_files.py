"""Opening and parsing of files that others wrote, in bounded time and memory.

Opening a FIFO waits for its writer, reading a device may never end, and a link or a name with
``..`` may lead out of its folder. All files of models, checkpoints, data sets and recipes are
opened here.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from mppo.safety.input_error import InputError

MAX_FILE_BYTES = 512 << 20
"""Limit for files that are read at once; the largest tokenizers have 40 MB."""
MAX_DEPTH = 100
"""Most levels of nested lists and objects in JSON and YAML."""

LFS_POINTER = "is a pointer of Git LFS, not the file itself"
LFS_FIX = "run `git lfs pull` in its repository, or download the file"
_LFS = b"version https://git-lfs.github.com/spec/"
_LFS_BYTES = 1024
"""Pointers are smaller."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading, without waiting for the writer of a FIFO.

    Raises:
        OSError: no such file, or not readable.
        InputError: the path is a folder, FIFO, device or socket, or the file is a Git LFS pointer.
    """
    _check_regular(path, os.stat(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(descriptor))  # the path may name another file by now
        if os.pread(descriptor, len(_LFS), 0) == _LFS:
            raise InputError(f"{path}: {LFS_POINTER}; {LFS_FIX}")
    except (ValueError, OSError):
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is what a clone without Git LFS has instead of a large file. Raises
    OSError."""
    if not path.is_file() or path.stat().st_size > _LFS_BYTES:
        return False
    with path.open("rb") as stream:
        return stream.read(len(_LFS)) == _LFS


def read_file(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """Read the bytes of a regular file; raises as ``open_file``, and InputError if it is larger
    than ``limit``."""
    with open_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        data = b"" if size > limit else stream.read(limit + 1)
    if max(size, len(data)) > limit:
        raise InputError(
            f"{path}: has {max(size, len(data))} bytes, more than {limit}; give the right file"
        )
    return data


def read_text(path: Path, limit: int = MAX_FILE_BYTES) -> str:
    """Read a regular file as UTF-8; raises as ``read_file``, and ValueError for other encodings."""
    return _decoded(read_file(path, limit), str(path))


def read_json(path: Path, nan: bool = False) -> dict[str, Any]:
    """Read the JSON object in a regular file; ``nan`` accepts ``NaN`` and ``Infinity``, which
    Python writes. InputError if it is missing or not readable, is no JSON object, or repeats a
    key."""
    try:
        text = read_text(path)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise InputError(f"{path}: {'no such file' if missing else error.strerror}") from error
    try:
        content = parse_json(text, unique=True, nan=nan)
    except ValueError as error:
        raise InputError(f"{path}: unreadable JSON ({error})") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: a JSON {type(content).__name__}, not an object")
    return content


def parse_json(text: str | bytes, unique: bool = False, nan: bool = False) -> Any:
    """Parse a JSON text (bytes are UTF-8); ``unique`` refuses an object that repeats a key, and for
    ``nan`` see ``read_json``. InputError if it is not JSON, is nested deeper than ``MAX_DEPTH``, or
    holds a number of thousands of digits or half a surrogate pair."""
    text = _decoded(text, "the text") if isinstance(text, bytes) else text
    hook, constant = unique_keys if unique else None, None if nan else _refuse_constant
    try:
        content = json.loads(text, parse_constant=constant, object_pairs_hook=hook)
    except RecursionError as error:
        raise InputError(f"nested more than {MAX_DEPTH} levels deep") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if error.lineno > 1 else ""
        raise InputError(f"{error.msg} at {line}column {error.colno}") from error
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise InputError("an integer of more than 4300 digits") from error
        raise
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_too_deep(content):
        raise InputError(f"nested more than {MAX_DEPTH} levels deep")
    if "\\ud" in text or "\\uD" in text:
        _check_pairs(json.dumps(content, ensure_ascii=False))
    return content


def inside(folder: Path, name: Any) -> Path:
    """Return the path of a file that a folder's index names.

    A link may lead to another file of the folder, or from a snapshot of Hugging Face's cache to its
    ``blobs``; InputError if the name is not a relative path, or leads out of the folder.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise InputError(f"{folder}: {name!r} is not a file name")
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts:
        raise InputError(f"{folder}: {name!r} leads out of the folder; name files inside it")
    real = Path(os.path.realpath(folder / name))
    if not any(real.is_relative_to(root) for root in _roots(folder)):
        raise InputError(
            f"{folder}: {name!r} is a link to {real}, outside the folder; copy the file into it"
        )
    return folder / name


def _roots(folder: Path) -> Iterator[Path]:
    real = Path(os.path.realpath(folder))
    yield real
    if real.parent.name == "snapshots":  # models--NAME/snapshots/REVISION
        yield real.parents[1] / "blobs"


def check_regular_files(folder: Path) -> None:
    """Check a folder whose files a library will open: InputError for a FIFO, device or socket,
    which may block it, or a text file larger than ``MAX_FILE_BYTES``."""
    for entry in sorted(folder.iterdir()):
        try:
            found = entry.stat()
        except OSError:  # a broken link: the reader of the file reports it
            continue
        if stat.S_ISDIR(found.st_mode):
            continue
        _check_regular(entry, found)
        text = entry.suffix in (".json", ".jinja", ".txt", ".model", ".py", ".tiktoken")
        if text and found.st_size > MAX_FILE_BYTES:
            raise InputError(
                f"{entry}: has {found.st_size} bytes, more than {MAX_FILE_BYTES}; "
                "give the right file"
            )


def _check_regular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "special")
        raise InputError(f"{path}: is {kind}, not a file; replace it by the file")


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8 at byte {error.start + 1}") from error


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise InputError(f"the key {twice[:40]!r} occurs twice")
    return content


def _check_pairs(text: str) -> None:
    """Reject half a surrogate pair, which no encoding and no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"half a surrogate pair ({error.object[error.start]!r})") from error


def _refuse_constant(name: str) -> Any:
    raise InputError(f"{name} is not JSON")


def _is_too_deep(content: Any) -> bool:
    level = [content] if isinstance(content, dict | list) else []
    for _ in range(MAX_DEPTH):
        inner = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        level = [item for item in inner if isinstance(item, dict | list)]
    return bool(level)

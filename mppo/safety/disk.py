"""Atomic replacement of files, and checksums that show whether a file has changed.

A folder that mppo writes at once (an exported model) holds ``.mppo.json``: the size and CRC-32 of
each of its files. With it, mppo knows whether it may replace the folder and whether a file changed.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from mppo.safety.input_error import InputError
from mppo.safety.input_files import inside, open_file, read_json

MARKER = ".mppo.json"
_FORMAT = 1
_BLOCK = 16 << 20


class Damaged(InputError):
    """A file differs from what was written."""


@dataclass(frozen=True)
class FileEntry:
    """Length of a file in bytes and CRC-32 of its contents."""

    size: int
    crc32: int


Files = Mapping[str, FileEntry]
"""Entries of files by their path relative to the folder."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file name to an ``OSError``; an error on an open file does not have it."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; at the end, rename it to ``path`` atomically. On an error
    ``path`` stays unchanged."""
    building = path.with_name(f".partial-{path.name}")
    try:
        with naming(path):
            yield building
            os.replace(building, path)
    except BaseException:
        building.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    with replacing(path) as building:
        building.write_bytes(data)


def write_bytes(file: Path, data: bytes) -> FileEntry:
    """Write a small file and flush it to disk."""
    with naming(file), file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return FileEntry(len(data), zlib.crc32(data))


def flush(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_name(path: Path, ending: str) -> Path:
    """Return ``<path><ending>-1``, or the same with the next number that is not in use."""
    number = 1
    while (other := path.with_name(f"{path.name}{ending}-{number}")).exists():
        number += 1
    return other


def set_aside(path: Path) -> Path:
    """Rename to ``<name>.old-1`` (or the next free number); returns the new path."""
    return path.rename(free_name(path, ".old"))


def file_checksum(file: Path) -> FileEntry:
    crc, size = 0, 0
    with open_file(file) as stream:
        while block := stream.read(_BLOCK):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return FileEntry(size, crc)


def check_sizes(folder: Path, files: Files) -> None:
    """Check that every listed file exists in full length; Damaged names one that does not."""
    for name, entry in files.items():
        try:
            size = inside(folder, name).stat().st_size
        except OSError:
            raise Damaged(f"{folder / name}: is missing") from None
        except ValueError as error:
            raise Damaged(str(error)) from error
        if size != entry.size:
            raise Damaged(f"{folder / name}: has {size} bytes, but {entry.size} were written")


def check_contents(folder: Path, files: Files, share: int = 0, shares: int = 1) -> None:
    """Check that the files hold the bytes that were written, every ``shares``-th one from the
    ``share``-th on, so that ranks can divide the work. Damaged names the first one that differs or
    cannot be read."""
    for name in sorted(files)[share::shares]:
        try:
            entry = file_checksum(folder / name)
        except OSError as error:
            raise Damaged(f"{folder / name}: cannot be read ({error.strerror})") from error
        except ValueError as error:  # not a file
            raise Damaged(str(error)) from error
        if entry != files[name]:
            raise Damaged(f"{folder / name}: its checksum differs from the one that was written")


def write_marker(folder: Path, files: Files) -> None:
    """Write ``.mppo.json``: mppo wrote this folder, with these files."""
    entries = {name: asdict(entry) for name, entry in sorted(files.items())}
    marker = {"format": _FORMAT, "files": entries}
    write_bytes(folder / MARKER, f"{json.dumps(marker, indent=1)}\n".encode())


def read_marker(folder: Path) -> Files | None:
    """Read the entries of the files that mppo wrote; None if mppo did not write the folder. Damaged
    if the marker cannot be read."""
    try:
        if not (folder / MARKER).exists():
            return None
        marker = read_json(folder / MARKER)
        return {name: FileEntry(**entry) for name, entry in marker["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise Damaged(f"{folder / MARKER}: cannot be read ({error})") from error


def is_as_written(folder: Path) -> bool:
    """Whether mppo wrote a folder and no file was added, removed or changed since.

    The contents are not read: the marker is written last, so a changed file has a later time.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    try:
        files = read_marker(folder)
    except Damaged:
        return False
    if files is None:
        return False
    found = {path.name: path.lstat() for path in folder.iterdir()}
    written = found.pop(MARKER).st_mtime_ns
    return found.keys() == files.keys() and all(
        stat.S_ISREG(entry.st_mode)
        and (entry.st_size, entry.st_mtime_ns <= written) == (files[name].size, True)
        for name, entry in found.items()
    )

"""Files that are there in full or not at all, and that are known again when they are read.

A folder that mppo writes as a whole (an exported model) holds ``.mppo.json``: the size and CRC-32
of each of its files. It says that mppo may replace the folder, and whether a file has changed.
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

from mppo.safety.input_files import inside, open_file, read_json

MARKER = ".mppo.json"
_FORMAT = 1
_BLOCK = 16 << 20


class Damaged(ValueError):
    """A file is not what was written."""


@dataclass(frozen=True)
class FileEntry:
    """What is known of a file: length in bytes and CRC-32 of the contents."""

    size: int
    crc32: int


Files = Mapping[str, FileEntry]
"""By path relative to their folder."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An ``OSError`` inside says which file it is about; writing to an open file does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write to; what was written takes the place of ``path`` at the end, in one step.

    On an error ``path`` stays as it was.
    """
    building = path.with_name(f".partial-{path.name}")
    try:
        with naming(path):
            yield building
            os.replace(building, path)
    except BaseException:
        building.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write a text file in one step."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """Write a file in one step."""
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
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_name(path: Path, ending: str) -> Path:
    """``<path><ending>-1``, or the next number under which nothing lies."""
    number = 1
    while (other := path.with_name(f"{path.name}{ending}-{number}")).exists():
        number += 1
    return other


def set_aside(path: Path) -> Path:
    """Rename to ``<name>.old-1`` (or the next free number); returns the new path."""
    return path.rename(free_name(path, ".old"))


def file_checksum(file: Path) -> FileEntry:
    """Size and CRC-32 of a file."""
    crc, size = 0, 0
    with open_file(file) as stream:
        while block := stream.read(_BLOCK):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return FileEntry(size, crc)


def check_sizes(folder: Path, files: Files) -> None:
    """Every listed file is there in full length.

    Raises:
        Damaged: naming the first that is not.
    """
    for name, entry in files.items():
        try:
            size = inside(folder, name).stat().st_size
        except OSError:
            raise Damaged(f"{folder / name}: is missing") from None
        except ValueError as error:
            raise Damaged(str(error)) from error
        if size != entry.size:
            raise Damaged(f"{folder / name}: has {size} bytes, {entry.size} were written")


def check_contents(folder: Path, files: Files, share: int = 0, shares: int = 1) -> None:
    """The files hold the bytes that were written.

    Args:
        folder: where they lie.
        files: what was written.
        share, shares: check every ``shares``-th file from the ``share``-th on, so that ranks can
            divide the work.

    Raises:
        Damaged: naming the first file that differs or cannot be read.
    """
    for name in sorted(files)[share::shares]:
        try:
            entry = file_checksum(folder / name)
        except OSError as error:
            raise Damaged(f"{folder / name}: cannot be read ({error.strerror})") from error
        except ValueError as error:  # not a file
            raise Damaged(str(error)) from error
        if entry != files[name]:
            raise Damaged(f"{folder / name}: its checksum is not the one that was written")


def write_marker(folder: Path, files: Files) -> None:
    """Say that mppo wrote a folder, and what is in it."""
    entries = {name: asdict(entry) for name, entry in sorted(files.items())}
    marker = {"format": _FORMAT, "files": entries}
    write_bytes(folder / MARKER, f"{json.dumps(marker, indent=1)}\n".encode())


def read_marker(folder: Path) -> Files | None:
    """The files that mppo wrote to a folder; None for a folder of another origin.

    Raises:
        Damaged: the marker cannot be read.
    """
    try:
        if not (folder / MARKER).exists():
            return None
        marker = read_json(folder / MARKER)
        return {name: FileEntry(**entry) for name, entry in marker["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise Damaged(f"{folder / MARKER}: cannot be read ({error})") from error


def is_as_written(folder: Path) -> bool:
    """Whether mppo wrote a folder and nothing was added to it, removed or changed since: the marker
    is the last file written, and gigabytes are not read for the answer."""
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

"""Private files of a run: permissions, and temporary ones, which are removed after a SIGKILL.

Every process has one private temporary folder, ``mppo-HOST-PID-START-RANDOM``: HOST is a hash of
host name and boot; PID and START (in ticks since the boot) identify the process uniquely. The
folder also lists what the process created elsewhere, such as shared memory. If a process could not
remove its folder, the next program removes it at its start, provided that the folder belongs to
this user and was created on this host since its last boot, that its process has ended, and that its
lock is free (a forked child holds it).
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import re
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

PRIVATE = 0o077
"""The umask that denies group and others all access."""
SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"mppo-([0-9a-f]{6})-(\d+)-(\d+)-\w+")
_NOTES = "made_elsewhere"
_own: dict[int, Path] = {}
"""Folder by process id, because a forked child creates its own."""
_making = threading.Lock()


def own_folder() -> Path:
    """Return this process's temporary folder, created at the first call and removed at exit."""
    pid = os.getpid()
    with _making:
        if pid not in _own:
            remove_leftovers()
            _own[pid], _ = _make(Path(tempfile.gettempdir()))
            atexit.register(_remove_own, pid)
        return _own[pid]


@contextmanager
def unfinished_folder(place: Path) -> Iterator[Path]:
    """Create a folder in ``place`` that the caller renames when it is finished; else remove it.
    Those of processes that have ended are removed first."""
    remove_leftovers(place)
    folder, lock = _make(place)
    try:
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def note(path: Path) -> None:
    """Register a path in shared memory or in the folder for temporary files that this process or
    its server created, to be removed with its folder."""
    with (own_folder() / _NOTES).open("a") as stream:
        stream.write(f"{path}\n")


def private_file(path: Path, text: str) -> None:
    """Write a file that only this user can read; replaces an existing file."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)


def remove_leftovers(place: Path | None = None) -> list[Path]:
    """Remove the temporary folders of processes that have ended in ``place``, or in the folder for
    temporary files."""
    place = place or Path(tempfile.gettempdir())
    removed = []
    with suppress(OSError):  # a folder that cannot be listed
        removed = [folder for folder in place.glob("mppo-*") if _remove_leftover(folder)]
    return removed


def _make(place: Path) -> tuple[Path, int]:
    """Create a folder of this process; return it with the descriptor that locks it."""
    pid = os.getpid()
    prefix = f"mppo-{_host()}-{pid}-{_start_ticks(pid) or 0}-"
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # a file system without locks: the process id remains
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder, lock


def _remove_own(pid: int) -> None:
    if pid == os.getpid():
        _remove(_own.pop(pid))


def _remove_leftover(folder: Path) -> bool:
    name = _NAME.fullmatch(folder.name)
    if name is None or name[1] != _host() or _is_running(int(name[2]), int(name[3])):
        return False
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # removed in the meantime
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(folder)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _remove(folder: Path) -> None:
    notes = folder / _NOTES
    lines = notes.read_text().splitlines() if notes.is_file() else []
    for path in map(Path, lines):
        if path.parent not in (SHARED_MEMORY, folder.parent):
            continue
        with suppress(OSError):  # removed already, or of another user
            if stat.S_ISDIR(path.lstat().st_mode):
                if not _is_served(path):
                    shutil.rmtree(path)
            else:
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _is_served(folder: Path) -> bool:
    """Whether a process listens on a socket in a folder: torch's manager of shared memory outlives
    its last client for a moment, then removes the folder itself, and aborts with a message on the
    terminal if its socket has gone."""
    sockets = Path("/proc/net/unix")
    return sockets.is_file() and f" {folder}/" in sockets.read_text(errors="replace")


@cache
def _host() -> str:
    """Return a short hash of host name and boot; a container with its own name is another host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = socket.gethostname() + (boot.read_text() if boot.is_file() else "")
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _is_running(pid: int, started: int) -> bool:
    """Whether the process with this id and start time still runs; True if that is unknown."""
    return not Path("/proc/self/stat").exists() or _start_ticks(pid) == started


def _start_ticks(pid: int) -> int | None:
    """Return a process's start in ticks since the boot; None if it has ended or is unknown."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(fields[18])


@contextmanager
def private_files(folder: Path) -> Iterator[None]:
    """Make the files of this process and its servers private (0700 and 0600) inside the context.

    An existing folder with the set-group-ID bit is shared: its group gets the same access to files
    as to the folder (``chmod 2750``: read, ``2770``: read and write). Other users never get access.
    """
    before = os.umask(_umask(folder))
    try:
        yield
    finally:
        os.umask(before)


def _umask(folder: Path) -> int:
    try:
        mode = folder.stat().st_mode
    except OSError:  # does not exist yet
        return PRIVATE
    return PRIVATE & ~(mode & stat.S_IRWXG) if mode & stat.S_ISGID else PRIVATE

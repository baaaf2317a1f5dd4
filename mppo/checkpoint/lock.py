"""A lock on the run folder: two jobs would overwrite each other's checkpoints and metrics."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mppo.recipe.errors import config_error
from mppo.supervision.first_rank import on_first_rank

LOCK = ".lock"
PATIENCE_S = 30.0
"""Default seconds to wait for a job that was just killed to release the folder."""
_KEY = "trainer.default_local_dir"
_POLL_S = 0.2


@contextmanager
def run_folder_lock(
    folder: Path, say: Callable[[str], None], patience_s: float = PATIENCE_S
) -> Iterator[None]:
    """Lock a run's folder on the first rank, creating the folder if needed. Collective.

    The operating system (``flock``) releases the lock when the process ends, for whatever reason.
    On a file system without such locks the folder is used without one, and a line reports it.
    ConfigError: another job holds the lock after ``patience_s``, or the folder cannot be written.
    """
    held: list[IO[str]] = []

    def hold() -> None:
        try:
            held.append(_open(folder, say, patience_s))
        except OSError as error:
            why = f"cannot be written ({error.strerror})"
            fix = "choose a folder that you may write to, on a disk with free space"
            raise config_error(_KEY, str(folder), why, fix, "run folder") from error

    on_first_rank(hold)
    try:
        yield
    finally:
        for stream in held:
            stream.close()


def _open(folder: Path, say: Callable[[str], None], patience_s: float) -> IO[str]:
    folder.mkdir(parents=True, exist_ok=True)
    stream = (folder / LOCK).open("a+")
    try:
        _take(stream, folder, say, patience_s)
    except BaseException:  # Ctrl-C too: an open stream would keep the lock
        stream.close()
        raise
    return stream


def _take(stream: IO[str], folder: Path, say: Callable[[str], None], patience_s: float) -> None:
    deadline, announced = time.monotonic() + patience_s, False
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = _holder(stream)
            if time.monotonic() >= deadline:
                why = f"another job is using the folder: {holder}"
                fix = "stop that job, or use another folder (trainer.experiment_name)"
                raise config_error(_KEY, str(folder), why, fix, source="run folder") from None
            if not announced:
                say(f"{folder}: waiting for another job to end: {holder}")
            announced = True
            time.sleep(_POLL_S)
        except OSError as error:
            say(f"{folder}: this file system has no locks against a second job ({error.strerror})")
            return
    stream.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    stream.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}))
    stream.flush()


def _holder(stream: IO[str]) -> str:
    stream.seek(0)
    try:
        holder = json.loads(stream.read())
        return f"pid {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "an unknown process"

"""One job per run folder: two would write each other's checkpoints and metrics."""

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

from mppo.config.errors import ConfigError, ConfigIssue
from mppo.supervision.first_rank import on_first_rank

LOCK = ".lock"
PATIENCE_S = 30.0
"""A job that was just killed may take so long to let go of the folder."""
_KEY = "trainer.default_local_dir"
_POLL_S = 0.2


@contextmanager
def run_folder_lock(
    folder: Path, say: Callable[[str], None], patience_s: float = PATIENCE_S
) -> Iterator[None]:
    """Hold a run's folder; made where missing. Collective, the first rank holds it.

    The lock is the operating system's (``flock``): it goes with the process that holds it, however
    that ends. A file system without such locks is used unlocked, with a line that says so.

    Args:
        folder: the run's.
        say: shows a line.
        patience_s: how long to wait for another job to end.

    Raises:
        ConfigError: another job holds it, or it cannot be written.
    """
    held: list[IO[str]] = []

    def hold() -> None:
        try:
            held.append(_open(folder, say, patience_s))
        except OSError as error:
            why = f"cannot be written ({error.strerror})"
            fix = "name a folder on a disk you may write to, with some space left"
            raise ConfigError([ConfigIssue(_KEY, str(folder), why, fix)], "run folder") from error

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
    except BaseException:  # Ctrl-C too: whoever gave up must not go on holding the lock
        stream.close()
        raise
    return stream


def _take(stream: IO[str], folder: Path, say: Callable[[str], None], patience_s: float) -> None:
    deadline, told = time.monotonic() + patience_s, False
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = _holder(stream)
            if time.monotonic() >= deadline:
                why = f"another job runs there: {holder}"
                fix = "stop that job, or use another folder (trainer.experiment_name)"
                issue = ConfigIssue(_KEY, str(folder), why, fix)
                raise ConfigError([issue], source="run folder") from None
            if not told:
                say(f"{folder}: waiting for another job to end: {holder}")
            told = True
            time.sleep(_POLL_S)
        except OSError as error:
            say(f"{folder}: no lock against a second job on this disk ({error.strerror})")
            return
    stream.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    stream.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}))
    stream.flush()


def _holder(stream: IO[str]) -> str:
    """Who holds the lock, as far as the file tells."""
    stream.seek(0)
    try:
        told = json.loads(stream.read())
        return f"pid {told['pid']} on {told['host']}, since {told['since']}"
    except (ValueError, KeyError, TypeError):
        return "an unknown process"

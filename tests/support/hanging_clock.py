"""A clock for the processes of ``reward.*``: no time passes except while a function hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mppo.rewards.workers import pool

CLOCK = """
import os, types
from mppo.rewards.workers import worker_server
now = 0.0
def monotonic():
    global now
    if any(os.path.exists("/proc/" + pid) for pid in os.listdir({folder!r})):
        now += 1e6
    return now
worker_server.time = types.SimpleNamespace(monotonic=monotonic)
"""
HANG = """
def hang():
    import os, time
    open(os.path.join({folder!r}, str(os.getpid())), "w").close()
    time.sleep(3600)
"""


def hanging_clock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give this clock to servers of reward workers that start from here on.

    A function that hangs exceeds any time limit soon; another one none, however slow the machine.

    Args:
        folder: a new folder, for the ids of the processes that hang.

    Returns:
        The Python text of the function ``hang``, for the module of a reward function.
    """
    folder.mkdir()
    monkeypatch.setattr(pool, "START", CLOCK.format(folder=str(folder)) + pool.START)
    return HANG.format(folder=str(folder))

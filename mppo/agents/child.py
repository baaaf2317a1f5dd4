"""Runs a program of an agent, and ends all its processes with it or with the rank.

``python -m mppo.agents.child PARENT COMMAND...``: the exit code is the command's. When the parent
has ended (even by ``kill -9``), this process gets SIGTERM, or the command ends, every process of
the command's session is killed. If this process is killed itself, the command ends with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_NOT_STARTED = 127


def main(arguments: list[str]) -> int:
    """Run the command until it ends or the parent (first argument: its process id) has ended;
    return its exit code as a shell does."""
    parent, command = int(arguments[0]), arguments[1:]
    child: subprocess.Popen[bytes] | None = None

    def end(*_: object) -> NoReturn:
        if child is not None:
            _kill(child.pid)
        os._exit(128 + signal.SIGTERM)

    def end_with_this() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        end()
    try:
        child = subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_this)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_STARTED
    code = child.wait()
    _kill(child.pid)
    return code if code >= 0 else 128 - code


def _kill(session: int) -> None:
    """Kill the processes of a session's first group."""
    with suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

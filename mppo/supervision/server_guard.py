"""Runs a command that must not outlive the process that started it.

``python -m mppo.supervision.server_guard PARENT_PID COMMAND...`` starts COMMAND in the guard's
process group and waits. When the parent has ended (even by ``kill -9``) or COMMAND ends, the guard
kills every process of that group. The kernel kills COMMAND when the guard dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1


def _die_with_guard() -> None:
    """Make the kernel kill this process when its parent dies. Linux only; elsewhere the guard kills
    the group when it ends regularly."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Run the command until it ends or the parent (first argument: its process id) has ended;
    return its exit code, or 1 if that is 0: a server should not end."""
    parent, command = int(arguments[0]), arguments[1:]
    if os.getpid() != os.getsid(0):
        os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: _kill_group())
    child = subprocess.Popen(command, preexec_fn=_die_with_guard)
    while child.poll() is None and os.getppid() == parent:
        time.sleep(_POLL_S)
    code = child.returncode
    if code is not None:
        print(f"mppo: {command[0]} ended with code {code}", flush=True)
    _kill_group()
    return code or 1


def _kill_group() -> None:
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

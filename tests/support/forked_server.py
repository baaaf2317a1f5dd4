"""SGLang servers forked from a process that has imported SGLang.

An SGLang server computes for seven seconds before it reads its options: it imports. Tests that need
another server for every model fork them from one process that made the imports. Guard, options,
environment and log are as in ``server_process``, whose own start other tests check.

``python forked_server.py SOCKET PID`` is that process; it ends with the process ``PID``.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from mppo.parallel.addresses import free_port
from mppo.rollout.sglang.server_options import own_server, server_environment
from mppo.rollout.sglang.server_process import ServerProcess

ADDRESS = "MPPO_TEST_SGLANG"
"""Environment variable with the path of the importing process's socket."""
SERVER = "sglang.launch_server"
IMPORTED = (
    SERVER,
    "sglang.srt.entrypoints.http_server",
    "sglang_cpu_compat.models.families",
    "sglang.srt.models.gemma2",
    "mppo.rollout.transport.checked_load",
    "mppo.rollout.transport.slice_load",
)
"""What a server imports."""
PATIENCE_S = 300.0


class ForkedProcess:
    """A forked guard and its server, with the part of ``subprocess.Popen`` that a server needs.

    Args:
        arguments: the server's command line.
        environment: all its environment variables.
        log: file to which the output is appended.
    """

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        # closed by the kernel when this process ends: the guard then kills the server
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(os.environ[ADDRESS])
        request = {"arguments": arguments, "environment": environment, "log": str(log.resolve())}
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        self._answers = self._connection.makefile("r")
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """Wait for the end; the exit code."""
        if self.returncode is None:
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)
            self._connection.close()
        return self.returncode


class ForkedServer(ServerProcess):
    """A server process that starts as a ``ForkedProcess``; all else is as ``own_server`` makes it.

    Args:
        server: the server as ``own_server`` makes it.
    """

    def __init__(self, server: ServerProcess) -> None:
        self.__dict__.update(vars(server))

    def start(self) -> None:
        self.port = free_port()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        _, _, module, *arguments = self.command(self.port)
        assert module == SERVER
        self._process = ForkedProcess(arguments, dict(self.environment), self.log)


def forked_server(*arguments: Any, **named: Any) -> ServerProcess:
    """As ``own_server``, with a forked server."""
    return ForkedServer(own_server(*arguments, **named))


def start_importing(watched: int) -> str:
    """Start the importing process, unless another process of the same test run has started it.

    Args:
        watched: it ends when this process ends.

    Returns:
        The address of its socket.
    """
    address = Path(tempfile.gettempdir()) / f"mppo-test-sglang-{watched}" / "socket"
    with suppress(FileExistsError):
        address.parent.mkdir(mode=0o700)
        subprocess.Popen(
            [sys.executable, __file__, str(address), str(watched)],
            env=os.environ | server_environment(1, True, "llama"),
            start_new_session=True,
        )
    deadline = time.monotonic() + PATIENCE_S
    while not address.exists():
        assert time.monotonic() < deadline, "SGLang was not imported"
        time.sleep(0.1)
    return str(address)


def _serve(address: str, watched: int) -> None:
    """Import, then fork a guard for every request until the watched process has ended."""
    warnings.simplefilter("ignore")
    for name in IMPORTED:
        importlib.import_module(name)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps guards
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen()
    os.rename(f"{address}.new", address)
    while Path(f"/proc/{watched}").exists():
        if select.select([listener], [], [], 1.0)[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _guard(connection)
            connection.close()
    os.unlink(address)
    os.rmdir(Path(address).parent)


def _guard(connection: socket.socket) -> None:
    """The guard's process: start the server, and kill its group when the requester has ended."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = json.loads(connection.makefile("r").readline())
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(request["environment"])
    server = os.fork()
    if server == 0:
        connection.close()
        _run_server(request["arguments"])
    connection.sendall(f"{os.getpid()}\n".encode())
    ended = 0
    while not ended:
        ended, status = os.waitpid(server, os.WNOHANG)
        if not ended and select.select([connection], [], [], 0.1)[0]:
            break
    if ended:
        code = os.waitstatus_to_exitcode(status)
        print(f"mppo: {SERVER} ended with code {code}", flush=True)
        with suppress(OSError):
            connection.sendall(f"{code or 1}\n".encode())
    os.killpg(0, signal.SIGKILL)


def _run_server(arguments: list[str]) -> None:
    """The server's process."""
    code: Any = 1
    try:
        random.seed()
        tempfile.tempdir = None
        sys.argv = [SERVER, *arguments]
        runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))

"""Run the commands of pages: import mppo once, then fork a process per command.

``python page_server.py SOCKET KIND`` serves ``page_client`` until its standard input ends.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 1500
"""Seconds after which a command is killed."""
IMPORTED = {
    "cpu": (
        "rank_imports",
        "mppo.trainer.validation.evaluation",
        "checkpoints_convert.commands",
        "pages.programs",
    ),
    "simulating": ("mppo_simulate.run", "pages.programs"),  # without stand-ins for the CPU
}
TRACEBACK = 86
"""Exit code of a command that ended with an exception."""


def serve(path: str) -> None:
    """Answer one connection per command, each in a process of its own."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # handlers are not waited for
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _handle(connection)
            os._exit(0)
        connection.close()


def _handle(connection: socket.socket) -> None:
    """Run a command in a group of processes that all end with it; send its exit code."""
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    text = b""
    while len(text) < int.from_bytes(size, "big"):
        text += connection.recv(1 << 20)
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        connection.close()
        _run(json.loads(text), streams)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(pid, signal.SIGKILL))
    signal.alarm(PATIENCE_S)
    _, status = os.waitpid(pid, 0)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    connection.sendall(bytes([os.waitstatus_to_exitcode(status) & 255]))


def _run(request: dict, streams: list[int]) -> None:
    code = TRACEBACK
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environ"])
        from pages.programs import run

        code = run(Path(request["argv"][0]).name, request["argv"][1:])
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_with_the_tests() -> None:
    while os.read(0, 1):  # sys.stdin would be locked in forked processes
        pass
    os._exit(0)


def main() -> None:
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests), str(tests / "support"), str(tests.parent)]
    sys.path.remove(str(Path(__file__).parent))
    warnings.simplefilter("ignore")
    for module in IMPORTED[sys.argv[2]]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # collections in a forked process would visit and copy what was imported

    # forked processes have this one thread only
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    serve(sys.argv[1])


if __name__ == "__main__":
    main()

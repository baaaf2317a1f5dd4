"""Run attacks as one user: import mppo once, then fork a process per attack.

Started by ``server`` as a script. Reads a JSON request per line from standard input and answers
each with a JSON line on standard output.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

IMPORTED = (
    "mppo.train", "mppo.trainer.run_setup", "mppo.rollout.local.local_engine",
    "mppo.trainer.validation.evaluation", "mppo.rollout.served_model", "mppo.preflight",
    "mppo.trainer.update.case_replay", "mppo.rewards.rules", "checkpoints_convert.commands",
    "safetensors.torch", "mppo.dumps.inspection",
    "mppo.report.html.page",
)  # fmt: skip
"""What rows import; importing it in every forked process would take longer than most rows."""
TRACEBACK = 86
"""Exit code of a process that ended with an exception."""


def fork_and_wait(call, folder: Path, output: Path, within_s: float) -> int | None:
    """Exit code of ``call(folder)`` in a separate process; None if it had to be killed."""
    pid = os.fork()
    if pid == 0:
        code = TRACEBACK
        try:
            os.setsid()
            stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            os.chdir(folder)
            code = call(folder) or 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def main() -> None:
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests), str(tests / "support"), str(tests.parent)]
    replies = os.dup(1)
    os.dup2(2, 1)  # output of imports must not mix with replies
    for module in IMPORTED:
        importlib.import_module(module)
    from attacks.tables import TABLES

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    gc.collect()
    gc.freeze()  # collections in a forked process would visit and copy what was imported
    for line in sys.stdin:
        request = json.loads(line)
        attack = TABLES[request["table"]].attacks[request["row"]]
        folder, output = Path(request["folder"]), Path(request["output"])
        call = getattr(attack, request["step"])
        start = time.monotonic()
        code = fork_and_wait(call, folder, output, request["within_s"])
        reply = {"code": code, "seconds": time.monotonic() - start}
        os.write(replies, (json.dumps(reply) + "\n").encode())


if __name__ == "__main__":
    main()

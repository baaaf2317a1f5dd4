"""Attacks on the sandbox for programs."""

from __future__ import annotations

import os
from pathlib import Path

from attacks.attack import Attack, Table

AS_BEFORE = "score 0.0; the trainer is as before"
TESTS = ("assert escaped",)
"""A program sets ``escaped`` if its attack succeeds, and would then score 1."""

CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    result = getattr(libc, name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result
"""

FORGE = """
import os
for fd in range(1, 16):
    try:
        os.write(fd, {content})
    except OSError:
        pass
{then}
"""


def _scored(program: str, tests: tuple[str, ...], says: str):
    """Score the program as a run does, and check that the trainer (this process) is unharmed."""

    def run(folder: Path) -> int:
        import json

        from mppo.batch.prompt import Prompt
        from mppo.recipe.errors import ConfigError
        from mppo.rewards.response import Response
        from mppo.rewards.rules import RuleReward
        from mppo.rewards.scores import read_scores

        before = os.getpriority(os.PRIO_PROCESS, 0), len(os.listdir("/proc/self/fd"))
        limits = {"cpu_s": 1, "memory_mb": 256, "output_mb": 1}
        reward = RuleReward("code", sandbox=limits, partial_credit=True)
        prompt = Prompt(0, (1,), "code", json.dumps(tests), "attack")
        try:
            reward.check([prompt])
        except ConfigError as refusal:  # a kernel may refuse namespaces to all but root
            refused = os.geteuid() != 0 and "refuses to isolate programs" in str(refusal)
            print(f"{says}, because nothing was run: {refusal}" if refused else refusal)
            return 0 if refused else 2
        text = program.replace("PARENT", str(os.getpid())).replace("FOLDER", str(folder))
        responses = [Response(prompt, text)]
        (judgement,) = read_scores(reward(responses), responses)
        after = os.getpriority(os.PRIO_PROCESS, 0), len(os.listdir("/proc/self/fd"))
        harm = "as before" if before == after else f"not as before: {before}, {after}"
        print(f"score {judgement.score}; the trainer is {harm}; {judgement.unscored}")
        return 0

    return run


def _row(given: str, program: str, says: str = AS_BEFORE, tests: tuple[str, ...] = TESTS) -> Attack:
    return Attack(given, run=_scored(program, tests, says), says=says, code=0, by_user=True)


def _forged(given: str, content: str, then: str = "os._exit(0)") -> Attack:
    program = FORGE.format(content=content, then=then)
    return _row(given, program, says=AS_BEFORE + "; bad_verdicts")


SIGNALS = (
    _row("`kill(0, SIGKILL)`", "import os\nos.kill(0, 9)\nescaped = True"),
    _row("`kill(-1, SIGKILL)`", "import os\nos.kill(-1, 9)\nescaped = True"),
    _row("SIGKILL to the trainer", "import os\nos.kill(PARENT, 9)\nescaped = True"),
    _row(
        "SIGSTOP to the trainer's process group", "import os\nos.killpg(PARENT, 19)\nescaped = True"
    ),
    _row(
        "`setpriority` of its process group",
        "import os\nos.setpriority(os.PRIO_PGRP, 0, 19)\nescaped = True",
    ),
    _row(
        "`setpriority` of all processes of the user",
        "import os\nos.setpriority(os.PRIO_USER, 0, 19)\nescaped = True",
    ),
    _row("`ptrace` of the trainer", CALL + "call('ptrace', 16, PARENT, 0, 0)\nescaped = True"),
    _row(
        "clears the signal at its parent's end",
        CALL + "call('prctl', 1, 0, 0, 0, 0)\nescaped = True",
    ),
    _row(
        "an alarm whose handler raises while the tests run",
        "import signal\nescaped = False\n"
        "def handler(*_): raise BaseException\n"
        "signal.signal(signal.SIGALRM, handler)\nsignal.setitimer(signal.ITIMER_REAL, 1e-6, 1e-4)",
    ),
)

RESOURCES = (
    _row("a fork bomb", "import os\nwhile True: os.fork(); escaped = True"),
    _row(
        "a thread bomb",
        "import threading\nwhile True:\n"
        "    threading.Thread(target=threading.Event().wait).start(); escaped = True",
    ),
    _row(
        "System V shared memory of 1 GiB under a limit of 256 MiB",
        CALL + "call('shmget', 0, 1 << 30, 0o1600)\nescaped = True",
    ),
    _row(
        "System V message queues",
        CALL + "call('msgget', 0, 0o1600)\nescaped = True",
    ),
    _row(
        "POSIX message queues",
        CALL + "call('syscall', 240, b'q', 0o102, 0o600, 0)\nescaped = True",
    ),
    _row("a file in memory", "import os\nos.write(os.memfd_create('x'), b'x')\nescaped = True"),
    _row(
        "a key in the kernel's keyring",
        CALL + "call('syscall', 248, b'user', b'k', b'x' * 99, 99, -4)\nescaped = True",
    ),
    _row("a list of 4 GB", "x = [0] * (1 << 29)\nescaped = True"),
    _row(
        "shared anonymous memory of 1 GiB",
        CALL + "libc.mmap.restype = ctypes.c_long\n"
        "call('mmap', None, ctypes.c_size_t(1 << 30), 3, 0x21, -1, ctypes.c_long(0))\n"
        "escaped = True",
    ),
    _row("an endless loop", "while True: pass"),
    _row("sleep for an hour", "import time\ntime.sleep(3600)\nescaped = True"),
    _row("output without end", "while True: print('x' * 100000)"),
    _row("a sparse file of 1 TB as output", "import os\nos.ftruncate(1, 1 << 40)\nescaped = True"),
)

ESCAPES = (
    _row("reads /etc/passwd", "open('/etc/passwd').read()\nescaped = True"),
    _row("reads the trainer's environment", "open('/proc/PARENT/environ').read()\nescaped = True"),
    _row("writes a file", "open('FOLDER/new', 'w').write('x')\nescaped = True"),
    _row(
        "reads files through open folders",
        "import os\n"
        "for fd in range(16):\n"
        "    try:\n"
        "        os.open('etc/passwd', 0, dir_fd=fd); escaped = True\n"
        "    except (OSError, ValueError): pass",
    ),
    _row("a socket", CALL + "call('socket', 2, 1, 0)\nescaped = True"),
    _row(
        "a socket to the host of a virtual machine",
        CALL + "call('socket', 40, 1, 0)\nescaped = True",
    ),
    _row("a namespace of its own", CALL + "call('unshare', 0x10000000)\nescaped = True"),
    _row("runs a command", "import os\nos.execv('/bin/sh', ['sh', '-c', 'true'])\nescaped = True"),
    _row(
        "`bpf`, `io_uring_setup`, `userfaultfd`, `perf_event_open`, `process_vm_readv`",
        CALL + "for number in (321, 425, 323, 298, 310):\n"
        "    try:\n"
        "        call('syscall', number, 0, 0, 0, 0, 0, 0); escaped = True\n"
        "    except OSError as error:\n"
        "        if error.errno != 1: escaped = True",
    ),
)

VERDICTS = (
    _forged('writes `{"passed": [1000]}` into every file', """b'{"passed": [1000]}'"""),
    _forged("writes broken JSON", "b'{'"),
    _forged("writes `NaN`", """b'{"isolated": true, "passed": [NaN], "error": null}'"""),
    _forged("writes JSON 20,000 levels deep", "b'[' * 20000"),
    _forged("writes a megabyte", "b'1' * (1 << 20)"),
    _forged("reports that it was not isolated", """b'!no namespaces'"""),
    _forged("reports more passed tests than there are", "b'D' + b'1' * 1000 + b'.'"),
    _forged("reports no result for one test", "b'D.'"),
    _forged("writes a verdict, then lets the tests run", "b'D1.'", then="escaped = True"),
    _row("closes every file", "import os\nos.closerange(0, 16)\nescaped = True"),
    _row("`os._exit(0)`", "import os\nos._exit(0)"),
    _row("`sys.exit(0)`", "import sys\nsys.exit(0)"),
    _row("`SystemExit` with a code that cannot be compared", (
        "class Code:\n    def __eq__(self, other):\n        while True: pass\n"
        "raise SystemExit(Code())"
    )),
    _row("`atexit` that writes a verdict", (
        "import atexit, os\natexit.register(lambda: [os.write(fd, b'D1.') for fd in range(3, 16)])"
    )),
    _row("an exception of a megabyte", "raise ValueError('x' * (1 << 20))"),
    _row("an exception whose text never ends", (
        "class Loop(Exception):\n    def __str__(self):\n        while True: pass\nraise Loop"
    )),
    _row("an exception whose text is not a string", (
        "class Odd(Exception):\n    def __str__(self): return 7\nraise Odd"
    )),
    _row("a subclass of BaseException", "class Stop(BaseException): pass\nraise Stop"),
    _row("`KeyboardInterrupt`", "raise KeyboardInterrupt"),
    _row("`GeneratorExit` in a test", (
        "class Escaped:\n    def __bool__(self): raise GeneratorExit\nescaped = Escaped()"
    )),
    _row("replaces the function that prints tracebacks", (
        "import traceback\ntraceback.format_exc = lambda **_: 7\nraise ValueError"
    )),
    _row("endless recursion without a limit", (
        "import sys\nsys.setrecursionlimit(1 << 30)\ndef f(): f()\nf()"
    )),
    _row("a crash of the interpreter", CALL + "ctypes.string_at(0)"),
    _row("a megabyte of open brackets", "(" * (1 << 20)),
    _row("source with a null byte and half a surrogate pair", "escaped = '\0\ud800'"),
)  # fmt: skip

TABLE = Table(
    "Programs in the sandbox",
    "Each program runs in its own namespaces and session, with harmless system calls only. Its "
    "score is between 0 and 1, whatever it writes: the trainer reads only a mark for each test and "
    "how the program ended. If the kernel lets only root isolate programs, a run of another user "
    "refuses to start.",
    (*SIGNALS, *RESOURCES, *ESCAPES, *VERDICTS),
)

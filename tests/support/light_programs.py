"""Commands run in processes forked from one that has imported only what is quick to import.

A program must tell a mistake before it imports torch, Megatron, transformers or SGLang, unless it
must read a model or tensors to find it. ``LightPrograms`` says which of them a command imported:
a bound on its processor time that is the same on every machine.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "megatron", "transformers", "sglang")
"""Packages whose import takes seconds."""
IMPORTED = ("mppo.train", "mppo.config.checks", "mppo.config.load")
"""What most commands import; none of it is heavy."""
PATIENCE_S = 300
TRACEBACK = 86
"""Exit code of a command that ended with an exception."""


class Told(NamedTuple):
    """How a command ended.

    Attributes:
        code: its exit code.
        out: its standard output.
        err: its standard error.
        heavy: the packages of ``HEAVY`` that it imported.
    """

    code: int
    out: str
    err: str
    heavy: list[str]


class LightPrograms:
    """The process that forks commands; it ends with the ``with`` block."""

    def __enter__(self) -> LightPrograms:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, program: str, arguments: list[str], folder: Path, out: Path) -> Told:
        """Run a command.

        Args:
            program: a program's name, or ``python -m`` and a module.
            arguments: its arguments.
            folder: its working directory.
            out: an empty folder for its output.
        """
        request = [program, arguments, str(folder), str(out)]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        heavy = json.loads((out / "heavy").read_text())
        return Told(code, (out / "1").read_text(), (out / "2").read_text(), heavy)


def scripts() -> dict[str, str]:
    """``module:function`` by the name of each program of mppo and its extras."""
    found: dict[str, str] = {}
    for project in [ROOT / "pyproject.toml", *ROOT.glob("extras/*/pyproject.toml")]:
        text = project.read_text().partition("[project.scripts]")[2].partition("\n[")[0]
        found |= dict(re.findall(r'^([\w-]+) = "(\S+)"$', text, re.MULTILINE))
    return found


def _run(program: str, arguments: list[str], folder: str, out: str) -> None:
    """Run a command in this process, and end the process."""
    signal.alarm(PATIENCE_S)
    code: object = TRACEBACK
    try:
        for number in (1, 2):
            stream = os.open(f"{out}/{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.dup2(stream, number)
        os.chdir(folder)
        module, _, name = scripts().get(program, program.rpartition(" ")[2] + ":main").partition(":")
        sys.argv = [program, *arguments]
        code = getattr(importlib.import_module(module), name)(arguments) or 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        Path(out, "heavy").write_text(json.dumps([name for name in HEAVY if name in sys.modules]))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def main() -> None:
    """Answer a command per line with its exit code."""
    for module in IMPORTED:
        importlib.import_module(module)
    assert not any(name in sys.modules for name in HEAVY)
    gc.collect()
    gc.freeze()  # collections in a forked process would visit and copy what was imported
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            _run(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()

"""Commands run in processes forked from one that has imported only what is quick to import.

A program must tell a mistake before it imports torch, Megatron, transformers or SGLang, unless it
must read a model to find it. Here such an import ends the command: a bound on its processor time
that is the same on every machine.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "megatron", "transformers", "sglang")
"""Packages whose import takes seconds."""
IMPORTED = ("mppo.train", "mppo.recipe.checks", "mppo.recipe.load")
"""What most commands import; none of it is heavy."""
PATIENCE_S = 300
TRACEBACK, HEAVY_IMPORT = 86, 87
"""Exit codes of a command that ended with an exception, or at a heavy import."""
READERS = ("/mppo/hub/", "/mppo/weights/")
"""Packages that read a model."""


class NoHeavyImports:
    """Ends the process that imports a package of ``HEAVY``, with the lines that do."""

    def find_spec(self, name: str, *_: object) -> None:
        """As an entry of ``sys.meta_path``; finds nothing."""
        if name.partition(".")[0] in HEAVY:
            traceback.print_stack()
            print(f"imports {name}", file=sys.stderr, flush=True)
            os._exit(HEAVY_IMPORT)


class Told(NamedTuple):
    """How a command ended.

    Attributes:
        code: its exit code.
        out: its standard output.
        err: its standard error.
    """

    code: int
    out: str
    err: str

    @property
    def must_read_a_model(self) -> bool:
        """Whether it ended at an import that reading a model needs."""
        return self.code == HEAVY_IMPORT and any(reader in self.err for reader in READERS)


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
        return Told(code, (out / "1").read_text(), (out / "2").read_text())


def main_of(program: str) -> Callable[[list[str]], int | None]:
    """The function of a program, by the name of its script, or by ``python -m`` and its module."""
    module = program.removeprefix("python -m ")
    for project in [ROOT / "pyproject.toml", *ROOT.glob("extras/*/pyproject.toml")]:
        found = re.search(rf'^{program} = "(\S+):main"$', project.read_text(), re.MULTILINE)
        module = found[1] if found else module
    spec = importlib.util.find_spec(module)
    assert spec is not None, program
    if spec.submodule_search_locations is not None:
        module += ".__main__"
    return importlib.import_module(module).main


def _run(program: str, arguments: list[str], folder: str, out: str) -> None:
    """Run a command in this process, and end the process."""
    signal.alarm(PATIENCE_S)
    code: object = TRACEBACK
    try:
        for number in (1, 2):
            stream = os.open(f"{out}/{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.dup2(stream, number)
        os.chdir(folder)
        sys.meta_path.insert(0, NoHeavyImports())
        sys.argv = [program, *arguments]
        code = main_of(program)(arguments) or 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def main() -> None:
    """Answer a command per line with its exit code."""
    for module in IMPORTED:
        importlib.import_module(module)
    assert not set(HEAVY) & sys.modules.keys()
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

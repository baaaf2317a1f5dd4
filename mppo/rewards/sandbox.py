"""Scores programs by their tests, each run in a sandbox of its own.

The sandbox is made of what the Linux kernel offers an ordinary process, so that no container
service is needed: namespaces of its own (network without an interface, processes, IPC, an empty
read-only root directory), no privilege and no capability, and limits of time, memory, output and
processes. Where the kernel refuses these, nothing is run and the recipe is refused: there is no
weaker mode.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mppo.config.errors import ConfigError, Fault

CHILD = Path(__file__).with_name("sandbox_child.py")
GRACE_S = 30.0
"""Seconds for starting and ending an interpreter, on top of the program's own wall-clock limit."""
FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
PROBE = """
import os
try:
    seen = os.listdir("/")
except OSError:
    seen = []
assert seen == [] and os.getuid() != 0
"""


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Args:
        passed: one entry per test that was run.
        finished: the program and its tests came to their end within the limits.
        output: what it wrote to standard output.
        error: traceback of the program itself, or None.
    """

    passed: tuple[bool, ...]
    finished: bool
    output: str
    error: str | None


@dataclass(frozen=True)
class Sandbox:
    """Where programs run.

    Args:
        cpu_s: processor seconds a program may use, tests included.
        memory_mb: address space.
        output_mb: size of its output.
        modules: installed modules a program may import besides common ones of the standard library
            (numpy, for instance); they are loaded before the file system goes away.
    """

    cpu_s: int = 5
    memory_mb: int = 1024
    output_mb: int = 4
    modules: Sequence[str] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        for name in ("cpu_s", "memory_mb", "output_mb"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                where = f"reward.kwargs.sandbox.{name}"
                raise ConfigError([Fault(where, value, "no positive whole number", "1 or more")])

    def check(self) -> None:
        """Find out whether this machine can isolate programs.

        Raises:
            ConfigError: it cannot.
        """
        try:
            outcome = self.run(PROBE)
        except OSError as error:
            why = f"this machine refuses to isolate programs: {error}"
        else:
            if outcome.finished and outcome.error is None:
                return
            why = f"a program was not isolated, or did not run: {outcome.error}"
        cure = (
            "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or a container that "
            "permits them), or run programs elsewhere with reward.name=remote"
        )
        raise ConfigError([Fault("reward.verifier", "code", why, cure)])

    def run(self, program: str, tests: Sequence[str] = (), stdin: str = "") -> Outcome:
        """Run a program and then its tests in the same namespace.

        Raises:
            OSError: the kernel refused to isolate it; it was not run.
        """
        with (
            tempfile.TemporaryDirectory(prefix="mppo-sandbox-") as root,
            tempfile.TemporaryFile() as output,
            tempfile.TemporaryFile() as result,
        ):
            job = {
                "program": program,
                "tests": list(tests),
                "stdin": stdin,
                "root": root,
                "result_fd": result.fileno(),
                "cpu_s": self.cpu_s,
                "wall_s": 5 * self.cpu_s,
                "memory_mb": self.memory_mb,
                "output_mb": self.output_mb,
                "modules": list(self.modules),
            }
            self._start(job, output, result.fileno())
            verdict, text = _read(result), _read(output)
        if not verdict:
            return Outcome((), finished=False, output=text, error=None)
        parsed = json.loads(verdict)
        if not parsed["isolated"]:
            raise OSError(parsed["error"])
        passed = tuple(map(bool, parsed["passed"]))
        return Outcome(passed, finished=True, output=text, error=parsed["error"])

    def _start(self, job: dict[str, Any], output: Any, result_fd: int) -> None:
        site = [] if self.modules else ["-S"]
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", *site, str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            pass_fds=(result_fd,),
            cwd="/",
            env={"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        try:
            process.communicate(json.dumps(job).encode(), timeout=job["wall_s"] + GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # the program goes with it: it asked the kernel to die with its parent
            process.communicate()


@dataclass(frozen=True)
class CodeVerifier:
    """Share of tests that a response's program passes.

    Args:
        sandbox: where it runs.
        partial_credit: give the share; otherwise 1 where all pass and else 0.
    """

    sandbox: Sandbox
    partial_credit: bool = False

    def __call__(self, response: str, ground_truth: str, extra: Mapping[str, Any]) -> float:
        """Score of a response.

        Args:
            response: its last fenced Python block is the program; without one, all of it.
            ground_truth: JSON list: of Python statements that raise where the program is wrong, or
                of ``{"input": text, "output": text}``.
            extra: not used.

        Raises:
            ValueError: the ground truth is of neither form.
        """
        tests = parse_tests(ground_truth)
        program = extract_program(response)
        if isinstance(tests[0], str):
            passed = self.sandbox.run(program, tests).passed
        else:
            passed = tuple(self._answers(program, test) for test in tests)
        share = sum(passed) / len(tests)
        return share if self.partial_credit else float(share == 1.0)

    def _answers(self, program: str, test: Mapping[str, str]) -> bool:
        outcome = self.sandbox.run(program, stdin=test["input"])
        right = outcome.output.split() == test["output"].split()
        return outcome.finished and outcome.error is None and right


def extract_program(response: str) -> str:
    """The last fenced Python block of a response, or all of it."""
    blocks = FENCED.findall(response)
    return blocks[-1] if blocks else response


def parse_tests(ground_truth: str) -> list[Any]:
    """The tests of a ground truth, all of one form.

    Raises:
        ValueError: it is of neither form, or empty.
    """
    try:
        tests = json.loads(ground_truth)
    except ValueError:
        tests = None
    wanted = {"input", "output"}
    if isinstance(tests, list) and tests:
        if all(isinstance(test, str) for test in tests):
            return tests
        if all(isinstance(test, dict) and wanted <= test.keys() for test in tests):
            return tests
    raise ValueError(
        "the ground truth of a program must be a JSON list of test statements, or of objects "
        f"with 'input' and 'output'; it is {ground_truth[:80]!r}"
    )


def _read(file: Any) -> str:
    file.seek(0, os.SEEK_SET)
    return file.read().decode(errors="replace")

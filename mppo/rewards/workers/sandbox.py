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

from mppo.config.errors import ConfigError, ConfigIssue
from mppo.rewards.judgement import Unscored

PACKAGES = str(Path(__file__).parents[3])
START = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from mppo.rewards.workers.sandbox_child import main; main()"
)
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
GRACE_S = 30.0
"""Seconds for starting and ending an interpreter, on top of the program's own wall-clock limit."""
FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
RAN = b"R"
VERDICT = re.compile(rb"R(?:D(?P<passed>[01]*)|E(?P<error>.*))\.", re.DOTALL)
"""What the child writes where the program came to its end."""
MAX_VERDICT_BYTES = 1 << 16
PROBE = """
import os
try:
    seen = os.listdir("/")
except OSError:
    seen = []
assert seen == [] and os.getuid() != 0
"""


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended.

    Args:
        passed: one entry per test; none where the program itself failed.
        finished: the program and its tests came to their end within the limits.
        output: what it wrote to standard output.
        error: traceback of the program itself, or None.
        forged: its process wrote something that is no verdict; it did not finish.
    """

    passed: tuple[bool, ...]
    finished: bool
    output: str
    error: str | None
    forged: bool = False


@dataclass(frozen=True)
class Sandbox:
    """Where programs run.

    Args:
        cpu_s: processor seconds a program may use, tests included.
        memory_mb: address space. No memory can be had outside it: the system calls that give some
            (shared memory, message queues, files in memory) are refused.
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
                raise ConfigError(
                    [ConfigIssue(where, value, "no positive whole number", "1 or more")]
                )

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
        fix = (
            "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or a container that "
            "permits them), or run programs elsewhere with reward.name=remote"
        )
        raise ConfigError([ConfigIssue("reward.verifier", "code", why, fix)])

    def run(self, program: str, tests: Sequence[str] = (), stdin: str = "") -> ProgramResult:
        """Run a program and then its tests in the same namespace.

        Raises:
            OSError: the kernel refused to isolate it; it was not run.
        """
        job = {
            "program": program,
            "tests": list(tests),
            "stdin": stdin,
            "parent": os.getpid(),
            "cpu_s": self.cpu_s,
            "wall_s": 5 * self.cpu_s,
            "memory_mb": self.memory_mb,
            "output_mb": self.output_mb,
            "modules": list(self.modules),
        }
        with tempfile.TemporaryFile() as output:
            in_order, verdict = self._start(job, output)
            output.seek(0)
            text = output.read(self.output_mb << 20).decode(errors="replace")
        if verdict.startswith(b"!"):  # before the program runs, only our own code writes
            raise OSError(verdict[1:].decode(errors="replace"))
        return _judge(verdict, in_order, len(tests), text)

    def _start(self, job: dict[str, Any], output: Any) -> tuple[bool, bytes]:
        """Whether the program's process ended by itself, in order, and what it said."""
        site = [] if self.modules else ["-S"]
        reading, writing = os.pipe()
        for end in (reading, writing):
            os.set_blocking(
                end, False
            )  # a program that fills the pipe gets an error, and none waits
        try:
            with os.fdopen(writing, "wb"):
                process = subprocess.Popen(
                    [sys.executable, "-I", "-B", *site, "-c", START, PACKAGES],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(writing,),
                    cwd="/",
                    env=ENVIRONMENT,
                    start_new_session=True,
                )
            text = json.dumps({**job, "verdict_fd": writing}).encode()
            try:
                process.communicate(text, timeout=job["wall_s"] + GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()  # the program goes with it: it asked the kernel to die with it
                process.communicate()
            try:
                verdict = os.read(reading, MAX_VERDICT_BYTES)
            except BlockingIOError:  # it is empty, and the program's end not complete
                verdict = b""
        finally:
            os.close(reading)
        return process.returncode == 0, verdict


def _judge(verdict: bytes, in_order: bool, tests: int, output: str) -> ProgramResult:
    """The outcome, from what the parent has seen itself."""
    match = VERDICT.fullmatch(verdict)
    if match is None or not in_order:
        forged = match is None and verdict not in (b"", RAN)
        return ProgramResult((), finished=False, output=output, error=None, forged=forged)
    if match["error"] is not None:
        error = match["error"].decode(errors="replace")
        return ProgramResult((), finished=True, output=output, error=error)
    if len(match["passed"]) != tests:
        return ProgramResult((), finished=False, output=output, error=None, forged=True)
    passed = tuple(mark == ord("1") for mark in match["passed"])
    return ProgramResult(passed, finished=True, output=output, error=None)


@dataclass(frozen=True)
class CodeVerifier:
    """Share of tests that a response's program passes.

    Args:
        sandbox: where it runs.
        partial_credit: give the share; otherwise 1 where all pass and else 0.
    """

    sandbox: Sandbox
    partial_credit: bool = False

    def __call__(
        self, response: str, ground_truth: str, extra: Mapping[str, Any]
    ) -> float | Unscored:
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
            outcomes = [self.sandbox.run(program, tests)]
            passed = sum(outcomes[0].passed)
        else:
            outcomes = [self.sandbox.run(program, stdin=test["input"]) for test in tests]
            passed = sum(map(_answers, outcomes, tests))
        if any(outcome.forged for outcome in outcomes):
            return Unscored("bad_verdicts")
        share = passed / len(tests)
        return share if self.partial_credit else float(share == 1.0)


def _answers(outcome: ProgramResult, test: Mapping[str, str]) -> bool:
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

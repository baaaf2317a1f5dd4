"""Programs, each of which runs in its own sandbox.

The sandbox uses only Linux features that unprivileged processes may use, and no container service:
namespaces (network without an interface, processes, IPC, an empty read-only root directory), no
privileges or capabilities, and limits of time, memory, output and processes. If the kernel refuses
any of them, no program runs and the recipe is rejected. There is no weaker mode.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mppo
import mppo_sandbox
from mppo.recipe.errors import ConfigError, ConfigIssue

PACKAGES = [str(Path(str(package.__file__)).parents[1]) for package in (mppo, mppo_sandbox)]
START = "import sys; sys.path += sys.argv[1:]; from mppo_sandbox.child import main; main()"
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
GRACE_S = 30.0
"""Seconds for the start and end of an interpreter, added to the program's wall-clock limit."""
RAN = b"R"
RESULT = re.compile(rb"R(?:D(?P<passed>[01]*)|E(?P<error>.*))\.", re.DOTALL)
"""The bytes that the child writes if the program and its tests ran to their end."""
MAX_RESULT_BYTES = 1 << 16
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
    """The result of a program.

    Args:
        passed: one entry per test; empty if the program itself failed.
        finished: whether the program and its tests ran to their end within the limits.
        output: the program's standard output.
        error: traceback of the program itself, or None.
        forged: the process wrote bytes to the result pipe that are not a result; ``finished`` is
            False then.
    """

    passed: tuple[bool, ...]
    finished: bool
    output: str
    error: str | None
    forged: bool = False


@dataclass(frozen=True)
class Sandbox:
    """The limits under which programs run.

    Args:
        cpu_s: processor seconds of a program and its tests.
        memory_mb: limit of the address space in MiB. System calls that give memory outside of it
            (shared memory, message queues, files in memory) are refused.
        output_mb: limit of the standard output in MiB.
        modules: installed modules, such as numpy, that a program may import besides common ones of
            the standard library. They are imported before the file system is hidden.
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
                    [ConfigIssue(where, value, "is not a positive integer", "give 1 or more")]
                )

    def check(self) -> None:
        """Check that this machine can isolate programs.

        Raises:
            ConfigError: the kernel refuses, or a test program was not isolated.
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
            "permits them), or run programs elsewhere: set reward.url to a SandboxFusion service"
        )
        raise ConfigError([ConfigIssue("reward.verifier", "code", why, fix)])

    def run(self, program: str, tests: Sequence[str] = (), stdin: str = "") -> ProgramResult:
        """Run a program and then its tests in the same Python namespace.

        Raises:
            OSError: the kernel refused to isolate the program; it did not run.
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
            ended_normally, written = self._start(job, output)
            output.seek(0)
            text = output.read(self.output_mb << 20).decode(errors="replace")
        if written.startswith(b"!"):  # written before the program starts, by our own code
            raise OSError(written[1:].decode(errors="replace"))
        return _program_result(written, ended_normally, len(tests), text)

    def _start(self, job: dict[str, Any], output: Any) -> tuple[bool, bytes]:
        """Run a job; return whether its process ended by itself with exit code 0, and the bytes
        that it wrote to the result pipe."""
        site = [] if self.modules else ["-S"]
        reading, writing = os.pipe()
        for end in (reading, writing):
            # a program that fills the pipe gets an error, and neither side waits for the other
            os.set_blocking(end, False)
        try:
            with os.fdopen(writing, "wb"):
                process = subprocess.Popen(
                    [sys.executable, "-I", "-B", *site, "-c", START, *PACKAGES],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(writing,),
                    cwd="/",
                    env=ENVIRONMENT,
                    start_new_session=True,
                )
            text = json.dumps({**job, "result_fd": writing}).encode()
            try:
                process.communicate(text, timeout=job["wall_s"] + GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()  # the kernel then kills the program too (die_with_parent)
                process.communicate()
            try:
                written = os.read(reading, MAX_RESULT_BYTES)
            except BlockingIOError:  # nothing was written, and the program still holds the pipe
                written = b""
        finally:
            os.close(reading)
        return process.returncode == 0, written


def _program_result(written: bytes, ended_normally: bool, tests: int, output: str) -> ProgramResult:
    """Parse the bytes of the result pipe; only a process that ended normally counts."""
    match = RESULT.fullmatch(written)
    if match is None or not ended_normally:
        forged = match is None and written not in (b"", RAN)
        return ProgramResult((), finished=False, output=output, error=None, forged=forged)
    if match["error"] is not None:
        error = match["error"].decode(errors="replace")
        return ProgramResult((), finished=True, output=output, error=error)
    if len(match["passed"]) != tests:
        return ProgramResult((), finished=False, output=output, error=None, forged=True)
    passed = tuple(mark == ord("1") for mark in match["passed"])
    return ProgramResult(passed, finished=True, output=output, error=None)

"""Runs checks as processes with a time limit, and keeps one report file up to date."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu_machine import describe_machine

LINES_SHOWN = 25
"""Lines of a failed check's output in the report."""
PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"


class Mismatch(ValueError):
    """The numbers that a check found are not the expected ones."""


@dataclass(frozen=True)
class Check:
    """A command and what it shows.

    Args:
        name: name of the check, and of its log.
        shows: what is known if it passes.
        command: the command line.
        limit_s: seconds after which it is ended and counts as failed.
        environment: variables for the command.
        beside: a server's command that runs beside it and is ended with it.
        beside_environment: variables for the server.
        fresh: the run folder that the check writes; an earlier one is deleted first, since a run
            that has finished does nothing when it is started again.
        judge: reads the check's results after the command's success and describes them in one line;
            raises ``Mismatch`` if they are wrong.
    """

    name: str
    shows: str
    command: Sequence[str]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    beside: Sequence[str] = ()
    beside_environment: Mapping[str, str] = field(default_factory=dict)
    fresh: Path | None = None
    judge: Callable[[Path], str] | None = None

    def log(self, folder: Path) -> Path:
        """The file with the output of the command."""
        return folder / f"{self.name.replace(' ', '_')}.log"


@dataclass
class Result:
    """The result of a check.

    Args:
        check: the check.
        state: ``PASSED``, ``FAILED`` or ``NOT_RUN``.
        seconds: its duration.
        found: what it found, or why it failed.
        tail: last lines of the output of a failed check.
    """

    check: Check
    state: str = NOT_RUN
    seconds: float = 0.0
    found: str = ""
    tail: str = ""


def parser(prog: str, text: str) -> argparse.ArgumentParser:
    """The arguments of a script of checks.

    Args:
        prog: its name.
        text: what it does.
    """
    made = argparse.ArgumentParser(
        prog=prog, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, default=Path("gpu_report"), help="folder for results")
    made.add_argument("--commit", default="", help="commit of these files, if git does not know it")
    made.add_argument("--only", nargs="+", metavar="NAME", help="checks whose names contain NAME")
    return made


def report_checks(
    stages: list[list[Check]], folder: Path, only: Sequence[str] | None, commit: str
) -> int:
    """Run the chosen checks, write the report, print a line for each.

    Args:
        stages: all checks; those of a stage run at the same time.
        folder: where the report and the checks' results are written.
        only: parts of the names of the chosen checks; None: all.
        commit: of these files, if git does not know it.

    Returns:
        The exit code: 0 if all checks pass, 1 if one fails, 2 if none is chosen.
    """
    chosen = selected(stages, only)
    if not chosen:
        print(f"mppo: --only {' '.join(only or ())}: no check has such a name", file=sys.stderr)
        return 2
    (folder / "numbers").mkdir(parents=True, exist_ok=True)
    machine, report = describe_machine(commit), folder / "report.md"

    def write(results: Sequence[Result]) -> None:
        report.write_text(report_text(machine, results))

    results = run_checks(chosen, folder, write)
    for result in results:
        print(f"{result.state:8} {result.check.name:20} {result.seconds:5.0f} s  {result.found}")
    print(f"report: {report}")
    return 1 if any(result.state == FAILED for result in results) else 0


def run_checks(
    stages: Sequence[Sequence[Check]], folder: Path, on_change: Callable[[list[Result]], None]
) -> list[Result]:
    """Run stages of checks one after the other; the checks of a stage run at the same time.

    Args:
        stages: the checks.
        folder: where logs are written.
        on_change: called with all results before the first stage and after each.

    Returns:
        The results in the order of the checks.
    """
    results = [Result(check) for stage in stages for check in stage]
    on_change(results)
    for stage in stages:
        running = [_Running(check, folder) for check in stage]
        for one in running:
            result = one.result()
            results[next(i for i, r in enumerate(results) if r.check is one.check)] = result
        on_change(results)
    return results


class _Running:
    """A check whose processes have started."""

    def __init__(self, check: Check, folder: Path) -> None:
        self.check, self._folder = check, folder
        self._began = time.monotonic()
        log = check.log(folder)
        self._beside = None
        if check.fresh is not None:
            shutil.rmtree(check.fresh, ignore_errors=True)
        if check.beside:
            self._beside = _start(
                check.beside, log.with_suffix(".server.log"), check.beside_environment
            )
        self._process = _start(check.command, log, check.environment)

    def result(self) -> Result:
        """Wait for the command, end its processes, and judge its results."""
        left = self.check.limit_s - (time.monotonic() - self._began)
        try:
            code: int | None = self._process.wait(max(left, 0))
        except subprocess.TimeoutExpired:
            code = None
        for process in (self._process, self._beside):
            if process is not None:
                _end(process)
        seconds = time.monotonic() - self._began
        log = self.check.log(self._folder)
        if code is None:
            why = f"did not end within {self.check.limit_s:g} s"
        elif code:
            why = f"exit code {code}"
        else:
            try:
                found = self.check.judge(self._folder) if self.check.judge else ""
                return Result(self.check, PASSED, seconds, found)
            except Exception as error:  # whatever is wrong with the results of one check
                kind = "" if isinstance(error, Mismatch) else f"{type(error).__name__}: "
                why = f"{kind}{error}"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LINES_SHOWN:])
        return Result(self.check, FAILED, seconds, why, tail)


def _start(
    command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    with log.open("wb") as stream:
        return subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip


def _end(process: subprocess.Popen[bytes], patience_s: float = 60.0) -> None:
    """End a process and what it has started: politely, then by force.

    torchrun itself waits 30 s for its ranks, which are in sessions of their own, before it kills
    them: this must wait longer.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def simulated_peaks(log: str) -> dict[str, float]:
    """The peaks in GiB that ``mppo-simulate`` printed, by phase.

    Raises:
        Mismatch: the log has no table of phases.
    """
    table = re.search(r"^phase +peak .*\n((?:.+ {2,}[\d.]+ .*\n?)+)", log, re.MULTILINE)
    if table is None:
        raise Mismatch("the simulation printed no peaks")
    rows = (re.match(r"(.+?) {2,}([\d.]+) ", f"{row} ") for row in table[1].splitlines())
    return {row[1]: float(row[2]) for row in rows if row is not None}


def simulated_peak(log: str) -> tuple[float, str]:
    """The highest of these peaks, and its phase."""
    return max((peak, phase) for phase, peak in simulated_peaks(log).items())


def simulated_counts(log: str, begins: str) -> tuple[int, int]:
    """Operations and waits that ``mppo-simulate`` printed for phases whose name begins so."""
    rows = re.findall(rf"^{begins}.*? {{2,}}(?:\d+|-) +([\d,]+) +\S+ +([\d,]+) ", log, re.MULTILINE)
    counts = [[int(number.replace(",", "")) for number in row] for row in rows]
    return sum(row[0] for row in counts), sum(row[1] for row in counts)


def selected(stages: list[list[Check]], names: Sequence[str] | None) -> list[list[Check]]:
    """The checks whose names contain one of ``names``; None: all."""
    chosen = [
        [check for check in stage if names is None or any(name in check.name for name in names)]
        for stage in stages
    ]
    return [stage for stage in chosen if stage]


def report_text(machine: Mapping[str, str], results: Sequence[Result]) -> str:
    """The report in Markdown.

    Args:
        machine: what the checks ran on, by name.
        results: the results so far.
    """
    counts = {state: sum(r.state == state for r in results) for state in (PASSED, FAILED, NOT_RUN)}
    lines = ["# mppo on GPUs", ""]
    lines += [", ".join(f"{count} {state}" for state, count in counts.items()), ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += ["", "| check | result | s | found | shows |", "|-|-|-|-|-|"]
    for result in results:
        cells = [result.check.name, result.state, f"{result.seconds:.0f}", result.found]
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
        lines.append(f"| {' | '.join(cells)} | {result.check.shows} |")
    for result in results:
        if result.state == FAILED:
            command = " ".join(result.check.command)
            lines += ["", f"## {result.check.name}", "", f"    {command}", "", "```"]
            lines += [result.tail.replace("```", "'''"), "```"]
    return "\n".join(lines) + "\n"

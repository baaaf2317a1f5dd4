"""Execution of a plan: a share per rank, a journal for resuming, a progress line."""

from __future__ import annotations

import hashlib
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from mppo.weights.hf.output_folder import create_files
from mppo.weights.hf.transfer import Copier
from mppo.weights.torch_dist.conversion import Plan, Share

FINGERPRINT = "plan.sha256"
JOURNAL = "done.{rank}.log"
FLUSH_BYTES = 1 << 30
LINE_EVERY_S = 10.0


@dataclass(frozen=True)
class Ranks(Share):
    """The processes that share the work, and this one's share of it."""

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


def run_plan(plan: Plan, building: Path, ranks: Ranks, fingerprint: str) -> None:
    """Write this rank's share of a plan to ``building``, which an interrupted run of the same plan
    may have begun; one with another fingerprint is deleted first. Collective.

    Raises:
        ValueError: the disk has too little free space.
        OSError: the disk is full, or failed.
    """
    if ranks.rank == 0:
        _prepare(plan, building, fingerprint)
    ranks.barrier()
    done = _done(building)
    ranks.barrier()
    todo = {number: task for number, task in plan.tasks.items() if number not in done}
    progress = Progress(sum(task.nbytes for task in todo.values()), ranks)
    copier = Copier()
    journal = building / JOURNAL.format(rank=ranks.rank)
    finished: list[int] = []
    since_flush = 0
    for number, task in todo.items():
        copier.run(task)
        finished.append(number)
        since_flush += task.nbytes
        progress.add(task.nbytes)
        if since_flush >= FLUSH_BYTES:
            _record(copier, journal, finished)
            finished, since_flush = [], 0
    _record(copier, journal, finished)
    copier.close()
    progress.end()
    ranks.barrier()


def clear_journal(building: Path) -> None:
    """Delete the files that only an unfinished folder needs."""
    for file in (*building.glob(JOURNAL.format(rank="*")), building / FINGERPRINT):
        file.unlink()


def fingerprint_of(*parts: object) -> str:
    """A hash of everything that a plan depends on, to identify it."""
    return hashlib.sha256("\n".join(str(part) for part in parts).encode()).hexdigest()


def _prepare(plan: Plan, building: Path, fingerprint: str) -> None:
    """Create the files at their final size, unless an interrupted run of the plan has done it."""
    file = building / FINGERPRINT
    if file.exists() and file.read_text() == fingerprint:
        for journal in building.glob(JOURNAL.format(rank="*")):
            _drop_torn_line(journal)
        return
    if building.exists():
        shutil.rmtree(building)
    building.mkdir(parents=True)
    needed = sum(size for _, size in plan.files.values())
    free = shutil.disk_usage(building).free
    if needed > free:
        building.rmdir()
        raise ValueError(
            f"{building.parent}: {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed; free some "
            "space, or choose another disk"
        )
    for path in plan.files:
        path.parent.mkdir(parents=True, exist_ok=True)
    create_files(plan.files)
    file.write_text(fingerprint)


def _drop_torn_line(journal: Path) -> None:
    """Remove an incomplete last line, which the next number would otherwise continue."""
    lines, newline, _ = journal.read_text().rpartition("\n")
    journal.write_text(lines + newline)


def _done(building: Path) -> set[int]:
    numbers: set[int] = set()
    for journal in building.glob(JOURNAL.format(rank="*")):
        numbers.update(int(line) for line in journal.read_text().split() if line.isdigit())
    return numbers


def _record(copier: Copier, journal: Path, finished: list[int]) -> None:
    copier.flush()
    with journal.open("a") as stream:
        stream.write("".join(f"{number}\n" for number in finished))


class Progress:
    """Rank 0's progress line on stderr: share of its bytes done, and GB/s."""

    def __init__(self, total: int, ranks: Ranks) -> None:
        self._total, self._done = total, 0
        self._started = self._shown = time.monotonic()
        self._reports = ranks.rank == 0
        self._tty = sys.stderr.isatty()
        self._of = f" of rank 0 of {ranks.world}" if ranks.world > 1 else ""

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if self._reports and now - self._shown > (0.2 if self._tty else LINE_EVERY_S):
            self._shown = now
            self._show("\r" if self._tty else "", "" if self._tty else "\n")

    def end(self) -> None:
        if self._reports:
            self._show("\r" if self._tty else "", "\n")

    def _show(self, start: str, end: str) -> None:
        seconds = max(time.monotonic() - self._started, 1e-9)
        share = self._done / self._total if self._total else 1.0
        bar = "#" * int(30 * share)
        print(
            f"{start}[{bar:<30}] {100 * share:5.1f}%  {self._done / 1e9:.2f} GB{self._of}  "
            f"{self._done / 1e9 / seconds:.2f} GB/s",
            end=end, file=sys.stderr, flush=True,
        )  # fmt: skip

"""Shared functions of the benchmarks: alternating timings, result with machine and versions."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median

import torch
import transformers


@dataclass
class Seconds:
    """Wall-clock and processor seconds of every turn."""

    walls: list[float] = field(default_factory=list)
    processors: list[float] = field(default_factory=list)

    @property
    def wall(self) -> float:
        """The smallest."""
        return min(self.walls)

    @property
    def processor(self) -> float:
        """The smallest."""
        return min(self.processors)

    def take(self, work: Callable[[], object]) -> None:
        """Run a piece of work once and record its time."""
        start, start_processor = time.perf_counter(), time.process_time()
        work()
        self.walls.append(time.perf_counter() - start)
        self.processors.append(time.process_time() - start_processor)

    def over(self, other: Seconds) -> float:
        """Median over the turns of the ratio of this work's wall-clock seconds to another's."""
        return median(mine / theirs for mine, theirs in zip(self.walls, other.walls, strict=True))


def alternate(works: Mapping[str, Callable[[], object]], repeat: int) -> dict[str, Seconds]:
    """Times of several works in alternation, after one round of warm-up."""
    for work in works.values():
        work()
    times = {name: Seconds() for name in works}
    for _ in range(repeat):
        for name, work in works.items():
            times[name].take(work)
    return times


def parser(description: str, repeat: int | None = None) -> argparse.ArgumentParser:
    """Arguments of every benchmark: ``--out``, and ``--repeat`` if it has a default."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    if repeat is not None:
        made.add_argument("--repeat", type=int, default=repeat)
    made.add_argument("--out", type=Path, help="JSON file for the result (always printed)")
    return made


def conditions() -> dict[str, object]:
    """Command, date, machine and versions of a measurement."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        },
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def record(measured: Mapping[str, object], out: Path | None) -> None:
    """Print a result with command, date, machine and versions, and write it to ``--out``."""
    result = {**conditions(), **measured}
    text = _folded(json.dumps(result, indent=2))
    print(text)
    if out:
        out.write_text(text + "\n")


def _folded(text: str) -> str:
    """JSON with lists of numbers on one line each."""
    return re.sub(r"\[[\s\d.,e+-]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)

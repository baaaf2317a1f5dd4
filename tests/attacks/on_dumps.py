"""Attacks on what ``mppo-inspect`` and ``mppo-report`` read: run folders and dumps of others."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attacks.attack import Attack, Table
from attacks.inputs import (
    DEEP,
    LONG,
    RUN,
    Prepare,
    fifo,
    instead,
    sparse,
    steps,
    train,
    write,
    zeros,
)

STEP = Path("run/rollouts/step_1")


def run_and(spoil: Callable[[Path], None]) -> Prepare:
    """A run folder ``run`` with one step and its dump, then changed."""

    def prepare(folder: Path) -> None:
        kept = Path(os.environ["MPPO_CACHE"]) / "attacked-dump"
        if not kept.exists():
            new = Path(f"{kept}.new")
            options = ("trainer.dump_rollouts=true", f"trainer.default_local_dir={new}")
            assert train(*RUN, *options, *steps(1)) == 0
            shutil.rmtree(new / "checkpoints")
            new.rename(kept)
        shutil.copytree(kept, folder / "run")
        spoil(folder)

    return prepare


def _inspect(*arguments: str) -> Callable[[Path], int]:
    def run(folder: Path) -> int:
        from mppo.dumps.inspection import main

        return main(["run", *arguments])

    return run


def _report(folder: Path) -> int:
    from mppo.report.html.program import main

    code = main(["run"])
    page = folder / "run/report.html"
    print(f"{page.stat().st_size >> 20} MiB" if page.exists() else "no page")
    return code


def _row(**values: Any) -> Callable[[Path], None]:
    """Set entries of the first sequence's row."""

    def spoil(folder: Path) -> None:
        file = folder / STEP / "step.json"
        header = json.loads(file.read_text())
        header["rows"][0].update(values)
        file.write_text(json.dumps(header))

    return spoil


def _pieces(folder: Path) -> None:
    """Make the text of every token a megabyte."""
    file = folder / STEP / "rank_0.json"
    write(file, json.dumps({token: "x" * (1 << 20) for token in json.loads(file.read_text())}))


def _tensor(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Replace a tensor of the dump."""

    def spoil(folder: Path) -> None:
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file

        file = folder / STEP / "rank_0.safetensors"
        with safe_open(file, "pt") as opened:
            about = opened.metadata()
        tensors = load_file(file)
        save_file({**tensors, name: change(tensors[name])}, file, about)

    return spoil


def _inspected(
    given: str, spoil: Callable[[Path], None], says: str, *arguments: str, code: int = 2
) -> Attack:
    return Attack(given, _inspect(*arguments), says, code=code, prepare=run_and(spoil))


def _reported(given: str, spoil: Callable[[Path], None], says: str, code: int = 0) -> Attack:
    return Attack(
        given, _report, says, code=code, prepare=run_and(spoil), writes=("run/report.html",)
    )


TOKENS = ("--sequence", "0")

TABLE = Table(
    "Run folders and dumps that are shown",
    "`mppo-inspect` and `mppo-report` open regular files of limited size, check types and numbers "
    "against each other, and print no control character. What a report cannot read is left out.",
    (
        _inspected("a FIFO as a dump's header", instead(f"{STEP}/step.json", fifo),
                   "no dumped step"),
        _inspected("500 levels as header", lambda f: write(f / STEP / "step.json", DEEP),
                   "levels"),
        _inspected("a score of 5000 digits", lambda f: write(
            f / STEP / "step.json", f'{{"format": {LONG}}}'), "4300 digits"),
        _inspected("a score of 10^400", _row(score=1e300 * 1e300), "finite number"),
        _inspected("a score that is a text", _row(score="1"), "valid number"),
        _inspected("an escape sequence as data source", _row(data_source="\x1b]0;x\x07"),
                   "\\x1b]0;x\\x07", code=0),
        _inspected("a key that no dump has", _row(code="x"), "rows.0.code"),
        _inspected("a FIFO as texts of tokens", instead(f"{STEP}/rank_0.json", fifo), "is a FIFO",
                   *TOKENS),
        _inspected("/dev/zero as tensors", instead(f"{STEP}/rank_0.safetensors", zeros),
                   "is a device", *TOKENS),
        _inspected("a length beyond the tokens",
                   _tensor("batch.lengths_B", lambda x: x * 1000), "cannot be read", *TOKENS),
        _inspected("a prompt of negative length",
                   _tensor("batch.response_B", lambda x: x + 1000), "cannot be read", *TOKENS),
        _inspected("log-probabilities that are integers", _tensor("old.logprobs_T", lambda x: x
                   .long()), "cannot be read", *TOKENS),
        _inspected("digits of another script as step",
                   lambda f: (f / STEP).rename(f / "run/rollouts/step_\u0661"), "no dumped step"),
        _inspected("a FIFO as mark of lost work", instead(f"{STEP}/STALE", fifo), "is a FIFO"),
        _reported("a FIFO as status", instead("run/status.json", fifo), "report.html"),
        _reported("/dev/zero as status", instead("run/status.json", zeros), "report.html"),
        _reported("a FIFO as events", instead("run/events.jsonl", fifo), "report.html"),
        _reported("/dev/zero as events", instead("run/events.jsonl", zeros), "report.html"),
        _reported("a FIFO as samples", instead("run/samples.jsonl", fifo), "report.html"),
        _reported("a FIFO as metrics", instead("run/metrics.jsonl", fifo), "report.html"),
        _reported("a terabyte of metrics", instead("run/metrics.jsonl", sparse), "more than",
                  code=2),
        _reported("a metric of 5000 digits", lambda f: write(
            f / "run/metrics.jsonl", f'{{"step": 1, "x": {LONG}}}\n'), "line 1", code=2),
        _reported("a recipe of 500 levels", lambda f: write(f / "run/recipe.yaml", DEEP),
                  "report.html"),
        _reported("a megabyte as text of each token", _pieces, "0 MiB"),
    ),
)  # fmt: skip

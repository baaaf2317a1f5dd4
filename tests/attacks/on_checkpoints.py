"""Attacks on checkpoints and run folders."""

from __future__ import annotations

import os
from pathlib import Path

from attacks.attack import Attack, Table
from attacks.on_recipes import train

TINY = (
    "model.path=builtin:tiny",
    "data.task=arithmetic",
    "data.train_size=8",
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=4",
    "data.max_prompt_length=16",
    "data.max_response_length=8",
)


def _start(folder: Path) -> int:
    """A start of a tiny run in the folder ``run``."""
    return train(*TINY, f"trainer.default_local_dir={folder}/run")


def _pipe(folder: Path) -> None:
    (folder / "run").mkdir()
    os.mkfifo(folder / "run/metrics.jsonl")


def _nested(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run/recipe.yaml").write_text("[" * 100_000)
    (folder / "run/status.json").write_text("[" * 100_000)
    (folder / "run/metrics.jsonl").write_text('{"step": 1}\n')


TABLE = Table(
    "Checkpoints and run folders",
    "Nothing of a checkpoint is unpickled outside the restricted unpickler. A start looks at its "
    "whole run folder before it writes, and leaves it as it was where it is refused.",
    (
        Attack(
            "a pipe where a run writes its numbers",
            prepare=_pipe,
            run=_start,
            says="run/metrics.jsonl is not a file",
            within_s=60.0,
            writes=("run/.lock",),
        ),
        Attack(
            "results beside a recipe and a status that are nested 100,000 deep",
            prepare=_nested,
            run=_start,
            says="recipe.yaml is not there or cannot be read",
            within_s=60.0,
            writes=("run/.lock",),
        ),
    ),
)

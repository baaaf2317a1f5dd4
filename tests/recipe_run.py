"""Run a shipped recipe through the entry point on two forked ranks (``ranks``)."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import torch
from ranks import start_ranks

ROOT = Path(__file__).parents[1]
WORLD = 2


def _rank(rank: int, arguments: list[str], environment: dict[str, str]) -> None:
    warnings.simplefilter("ignore")
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    from mppo.train import main

    assert main(arguments) == 0


def run_recipe(name: str, run_dir: Path, *overrides: str, **environment: str) -> list[dict]:
    """Train as ``torchrun mppo/train.py --config recipes/<name>`` does.

    Args:
        name: file in ``recipes/``.
        run_dir: where the run writes.
        overrides: keys changed.
        environment: variables of the ranks.

    Returns:
        The metrics of every step.
    """
    from mppo.parallel.addresses import free_port

    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    keys = [f"trainer.default_local_dir={run_dir}", "trainer.export_hf=false", *overrides]
    arguments = ["--config", str(ROOT / "recipes" / name), *keys]
    start_ranks(_rank, (arguments, environment | place), WORLD)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    return [row for row in rows if "actor/grad_norm" in row]


def smaller(steps: int) -> list[str]:
    """Overrides that make a recipe short."""
    return [
        f"trainer.total_training_steps={steps}",
        "data.train_batch_size=8",
        "data.train_size=16",
        "data.val_size=4",
        "actor.ppo_mini_batch_size=4",
    ]

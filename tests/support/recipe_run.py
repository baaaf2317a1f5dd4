"""Run or evaluate a shipped recipe on forked ranks (``ranks``), by default two."""

from __future__ import annotations

import json
import os
import warnings
from importlib import import_module
from pathlib import Path

import torch
from ranks import start_ranks

ROOT = Path(__file__).parents[2]
WORLD = 2


def _rank(rank: int, program: str, arguments: list[str], environment: dict[str, str]) -> None:
    warnings.simplefilter("ignore")
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    assert import_module(program).main(arguments) == 0


def _start(
    program: str, name: str, arguments: list[str], environment: dict[str, str], world: int = WORLD
) -> None:
    from mppo.parallel.addresses import free_port

    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    arguments = ["--config", str(ROOT / "recipes" / name), *arguments]
    start_ranks(_rank, (program, arguments, environment | place), world)


def run_recipe(
    name: str, run_dir: Path, *overrides: str, world: int = WORLD, **environment: str
) -> list[dict]:
    """Train as ``torchrun mppo/train.py --config recipes/<name>`` does.

    Args:
        name: file in ``recipes/``.
        run_dir: where the run writes.
        overrides: keys changed.
        world: number of ranks.
        environment: variables of the ranks.

    Returns:
        The metrics of every step.
    """
    keys = [f"trainer.default_local_dir={run_dir}", "trainer.export_hf=false", *overrides]
    _start("mppo.train", name, keys, environment, world)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    return [row for row in rows if "actor/grad_norm" in row]


def evaluate_recipe(name: str, *arguments: str) -> None:
    """Evaluate as ``torchrun mppo/evaluate.py --config recipes/<name>`` does.

    Args:
        name: file in ``recipes/``.
        arguments: options, and keys changed.
    """
    _start("mppo.evaluate", name, list(arguments), {})


def smaller(steps: int) -> list[str]:
    """Overrides that make a recipe short."""
    return [
        f"trainer.total_training_steps={steps}",
        "data.train_batch_size=8",
        "data.train_size=16",
        "data.val_size=4",
        "actor.ppo_mini_batch_size=4",
    ]

"""What to simulate, as options of a command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """What to simulate.

    Args:
        world_size: ranks; None: as the recipe says.
        rank: which rank.
        all_stages: instead, the first rank of every pipeline stage.
        steps: PPO steps.
        quick: few layers and micro-batches, scaled to the recipe's.
        gpu: name or memory of the GPU.
        timeline: file for a trace of the memory; None: none.
        transformer_engine: folder with Transformer Engine's Python; None: it is absent.
    """

    world_size: int | None = None
    rank: int = 0
    all_stages: bool = False
    steps: int = 2
    quick: bool = False
    gpu: str = "h100-80gb"
    timeline: Path | None = None
    transformer_engine: Path | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say what to simulate."""
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--rank", type=int, default=0, help="which rank (default 0)")
    chosen.add_argument(
        "--all-stages", action="store_true", help="the first rank of every pipeline stage"
    )
    parser.add_argument("--steps", type=int, default=2, help="PPO steps (default 2)")
    parser.add_argument(
        "--quick", action="store_true", help="few layers and micro-batches, scaled to the recipe's"
    )
    parser.add_argument(
        "--gpu",
        default="h100-80gb",
        help="the GPU's name, or its memory in GiB (default h100-80gb)",
    )
    parser.add_argument(
        "--transformer-engine",
        type=Path,
        metavar="FOLDER",
        help="with Transformer Engine, whose Python is in this folder (docs/simulation.md)",
    )
    parser.add_argument("--timeline", type=Path, help="write a Chrome trace of the memory here")


def options_of(arguments: argparse.Namespace) -> Options:
    """The options among parsed arguments."""
    return Options(**{field.name: getattr(arguments, field.name) for field in fields(Options)})

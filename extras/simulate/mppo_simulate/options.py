"""Command-line options of the simulation."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """Options of the simulation.

    Args:
        world_size: number of ranks; None: the recipe's.
        rank: the rank to simulate.
        all_stages: simulate the first rank of every pipeline stage instead of ``rank``.
        all: simulate ranks that stand for all, and check what they do together.
        at_once: number of ranks that are simulated at the same time with ``all``.
        steps: number of PPO steps.
        quick: simulate few layers and micro-batches, and scale the results to the recipe's.
        gpu: name of the GPU, or its memory in GiB; None: the recipe's.
        timeline: file for a trace of the memory; None: no trace.
        transformer_engine: folder with the Python part of Transformer Engine; None: simulate
            without Transformer Engine.
    """

    world_size: int | None = None
    rank: int = 0
    all_stages: bool = False
    all: bool = False
    at_once: int = 2
    steps: int = 2
    quick: bool = False
    gpu: str | None = None
    timeline: Path | None = None
    transformer_engine: Path | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the simulation's options to a parser."""
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--rank", type=int, default=0, help="which rank (default 0)")
    chosen.add_argument(
        "--all-stages", action="store_true", help="the first rank of every pipeline stage"
    )
    chosen.add_argument(
        "--all",
        action="store_true",
        help="ranks that stand for all: do communications match, can streams race, ranks hang?",
    )
    parser.add_argument(
        "--at-once", type=int, default=2, help="with --all: ranks simulated at once (default 2)"
    )
    parser.add_argument("--steps", type=int, default=2, help="PPO steps (default 2)")
    parser.add_argument(
        "--quick", action="store_true", help="few layers and micro-batches, scaled to the recipe's"
    )
    parser.add_argument(
        "--gpu", help="the GPU's name, or its memory in GiB (default: trainer.gpu, or h100-80gb)"
    )
    parser.add_argument(
        "--transformer-engine",
        type=Path,
        metavar="FOLDER",
        help="with Transformer Engine, whose Python is in this folder (docs/simulation.md)",
    )
    parser.add_argument("--timeline", type=Path, help="write a Chrome trace of the memory here")


def options_of(arguments: argparse.Namespace) -> Options:
    """Take the simulation's options from parsed arguments."""
    return Options(**{field.name: getattr(arguments, field.name) for field in fields(Options)})

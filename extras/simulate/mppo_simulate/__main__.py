"""``mppo-simulate``: what a recipe does on its GPUs, without a GPU, weights or a download.

``mppo-simulate recipe.yaml --world-size 32`` executes one rank of the run at its real size on
tensors that have a shape but no data, and prints memory by phase and purpose, operations, waits of
the host for the GPU, communication, and whether the rank fits a GPU. docs/simulation.md describes
what the simulation covers and what it cannot show.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mppo.parallel.launch import prepare_imports
from mppo.safety.redact import redacted_output
from mppo_simulate.options import add_arguments, options_of


@redacted_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the program.

    Returns:
        The exit code: 0 if all simulated ranks fit, 1 if the simulated code fails, 2 for invalid
        input, 3 if a rank does not fit its GPU.
    """
    parser = argparse.ArgumentParser(
        prog="mppo-simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", type=Path, help="recipe (YAML)")
    parser.add_argument("--world-size", type=int, help="ranks; default: as the recipe says")
    add_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(argv)
    prepare_imports()
    from mppo_simulate.program import run_program  # it imports torch

    return run_program(arguments.config, arguments.overrides, options_of(arguments))


if __name__ == "__main__":
    sys.exit(main())

"""Evaluate a model folder on a recipe's validation prompts.

``torchrun mppo/evaluate.py --config recipe.yaml model.path=runs/demo/actor`` generates with the
recipe's engine and ``rollout.val_kwargs``, and scores with its reward. It prints the metrics that
the validation of a run logs: a table by data source on standard error, and one line of JSON on
standard output. The prompts are divided among the ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mppo.safety.redact import redacted_output
from mppo.supervision import exit_report
from mppo.supervision.rank_guard import start_guarded
from mppo.trainer.start.checked_recipe import evaluated_recipe
from mppo.trainer.validation.pair_judge import read_opponent


@redacted_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate; exit code 0, 2 for an invalid recipe or input, 1 for another failure."""
    arguments = _parse(argv)
    try:
        info, guard = start_guarded()
    except ValueError as error:
        return exit_report.refuse_recipe(error)
    try:
        opponent = read_opponent(arguments.judge, arguments.judge_model, arguments.against)
        recipe = evaluated_recipe(arguments.config, arguments.overrides, info)
    except ValueError as error:
        return exit_report.refuse_recipe(error, info.rank)
    from mppo.trainer.validation.evaluation import run_evaluation  # it imports torch

    return run_evaluation(recipe, opponent, arguments, info, guard)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mppo-evaluate", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="recipe (YAML)")
    out = "file to write the JSON to, besides standard output"
    parser.add_argument("--out", type=Path, help=out)
    samples = "file (JSONL) for every response with its prompt, ground truth, answer and score"
    parser.add_argument("--samples", type=Path, help=samples)
    judge = "URL of a judge (.../v1/chat/completions) that compares every response with another"
    parser.add_argument("--judge", metavar="URL", help=judge)
    parser.add_argument("--judge-model", metavar="NAME", help="the judge's name on that server")
    against = "--samples of another model, to compare with; default: the ground truths"
    parser.add_argument("--against", type=Path, help=against)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    sys.exit(main())

"""Predicted seconds of the cluster recipes as they are, and with the best that a search finds.

    python benchmarks/replanned_recipes.py [--recipe NAME ...] [--out FILE]

Prompts have a quarter, responses a half of their limit on average: the recipes do not say more. The
layout of a recipe that reproduces another system's run is that system's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import record

import mppo
from mppo.planning.time.search import PlannedLayout, Search
from mppo.planning.time.step_text import TimeOptions, Timing
from mppo.recipe.gpu_types import GIB

RECIPES = Path(__file__).parents[1] / "recipes"
LEAST = 8
"""GPUs from which a recipe is one for a cluster."""


def main() -> None:
    parser = record.parser(__doc__ or "")
    parser.add_argument("--recipe", nargs="+", help="names of recipes; default: all of a cluster")
    arguments = parser.parse_args()
    names = arguments.recipe or [path.stem for path in sorted(RECIPES.glob("*.yaml"))]
    rows: list[dict[str, Any]] = []
    for name in names:
        row = replan(name)
        if row is not None:
            rows.append(row)
            print(table([row])[-1], flush=True)
    record.record({"recipes": rows}, arguments.out)
    print("\n".join(table(rows)))


def replan(name: str) -> dict[str, Any] | None:
    """Predict a recipe and search for a faster layout; None: it is not for a cluster."""
    plan = mppo.plan(mppo.load(RECIPES / f"{name}.yaml"))
    if plan.world_size < LEAST:
        return None
    data = plan.recipe.data
    means = (data.max_prompt_length / 4, data.max_response_length / 2)
    timing = Timing.of(plan.recipe, plan.fit.gpu, TimeOptions(*means))
    _, now = timing.predict(plan.recipe, plan.plans, plan.fit, plan.hf_configs)
    place = (plan.world_size, plan.hf_configs, plan.fit.gpu)
    found = Search(plan.recipe, *place, timing.sequences, timing.kernels).best()
    row: dict[str, Any] = {
        "recipe": name,
        "gpus": now.gpus,
        "mean_tokens": means,
        "layout": plan.plans[0].layout.describe(),
        "predicted_s": round(now.seconds, 1),
        "compared": found.compared,
        "kernels": now.source,
    }
    if found.recipe is not None:
        row["best"] = _found(found.best[0], now.seconds)
    if found.ahead is not None:
        row["one_step_ahead"] = _found(found.ahead, now.seconds)
    return row


def _found(one: PlannedLayout, now: float) -> dict[str, Any]:
    return {
        "layout": one.choice.describe(),
        "predicted_s": round(one.prediction.seconds, 1),
        "gain": round(1 - one.prediction.seconds / now, 3),
        "spare_gib": round(-one.fit.verdict.over / GIB, 1),
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as Markdown, as in docs/measurements.md."""
    lines = [
        "| recipe | GPUs | its layout | predicted s | best found | predicted s | gain |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        best = row.get("best", {"layout": "none fits", "predicted_s": "-", "gain": 0.0})
        cells = (row["recipe"], row["gpus"], row["layout"], row["predicted_s"])
        found = (best["layout"], best["predicted_s"], f"{best['gain']:.0%}")
        lines.append(f"| {' | '.join(map(str, (*cells, *found)))} |")
    return lines


if __name__ == "__main__":
    main()

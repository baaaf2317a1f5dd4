"""Predicted seconds of two recipes while their largest avoidable costs are removed one by one.

    python benchmarks/removed_costs.py [--out FILE]

Each row is a recipe with one cost less than in the row before it; the last one is the recipe as it
is. Prompts have a quarter, responses half of their limit on average.
"""

from __future__ import annotations

from typing import Any

import record
from replanned_recipes import RECIPES

import mppo
from mppo.planning.time.step_text import TimeOptions, Timing


def both(**keys: object) -> list[str]:
    """Settings of actor and critic."""
    return [f"{role}.{key}={value}" for role in ("actor", "critic") for key, value in keys.items()]


def layout(role: str, tp: int, pp: int) -> list[str]:
    """Settings of a role's layout."""
    sizes = {"tensor": tp, "pipeline": pp}
    return [f"{role}.megatron.{name}_model_parallel_size={n}" for name, n in sizes.items()]


RECOMPUTED = [f"{role}.megatron.recompute_granularity=full" for role in ("actor", "critic")]
EIGHT = [*both(ppo_micro_batch_size_per_gpu=8), *RECOMPUTED]
LARGE = [*both(ppo_max_token_len_per_gpu=6144), *RECOMPUTED]
ROWS: dict[str, dict[str, list[str]]] = {
    "qwen3_30b_a3b_gsm8k_math": {
        "TP4 x PP2, recomputed": [*layout("actor", 4, 2), *layout("critic", 4, 2), *LARGE],
        "no exchanges of tensor parallelism: PP2, recomputed": LARGE,
        "no repeated forward passes: the recipe": [],
    },
    "qwen2.5_32b_gsm8k_math": {
        "actor TP8 x PP2, critic TP8, recomputed": [
            *(*layout("actor", 8, 2), *layout("critic", 8, 1), *EIGHT)
        ],
        "one pipeline: both TP8 x PP2, recomputed": [
            *(*layout("actor", 8, 2), *layout("critic", 8, 2), *EIGHT)
        ],
        "fewer exchanges of tensor parallelism: TP4 x PP4, recomputed": EIGHT,
        "no repeated forward passes: the recipe": [],
    },
}
"""By recipe and what is removed: the settings of the recipe that differ from what it is now."""


def predicted(name: str, settings: list[str]) -> dict[str, Any]:
    """The predicted seconds of a recipe with other settings, by phase."""
    plan = mppo.plan(mppo.load(RECIPES / f"{name}.yaml", *settings))
    data = plan.recipe.data
    means = TimeOptions(data.max_prompt_length / 4, data.max_response_length / 2)
    timing = Timing.of(plan.recipe, plan.fit.gpu, means)
    _, found = timing.predict(plan.recipe, plan.plans, plan.fit, plan.hf_configs)
    return {
        "predicted_s": round(found.seconds, 1),
        "phases_s": {phase.name: round(phase.seconds, 1) for phase in found.phases},
        "waits": {kind: round(share, 3) for kind, share in found.idle().items()},
        "mfu": {role: round(share, 3) for role, share in found.role_utilization().items()},
        "fits": plan.fit.verdict.fits,
        "kernels": found.source,
    }


def main() -> None:
    """Predict, print and record."""
    arguments = record.parser(__doc__ or "").parse_args()
    found: dict[str, Any] = {}
    for name, rows in ROWS.items():
        found[name] = {what: predicted(name, settings) for what, settings in rows.items()}
        for what, row in found[name].items():
            print(f"{name}: {what}: {row['predicted_s']} s", flush=True)
    record.record({"recipes": found}, arguments.out)


if __name__ == "__main__":
    main()

"""Mistakes between ranks and streams, each planted into the simulated processes of a small model.

``python tests/planted.py NAME...`` prints one line of JSON per name of ``PROGRAMS`` or
``MISTAKES``.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import planted_races  # noqa: F401  adds to MISTAKES
from planted_mistakes import MISTAKES
from simulated import loaded, sized, small_case

from mppo.simulation.case import RankCase
from mppo.simulation.isolated import SimulationError, isolated
from mppo.simulation.quick import with_layers
from mppo.simulation.rank import simulate_rank
from mppo.simulation.records import RankRecord
from mppo.simulation.together.findings import find
from mppo.simulation.together.run import rules_of

SHORT = ("data.max_prompt_length=64", "data.max_response_length=64")


def of_roles(*settings: str, roles: Sequence[str] = ("actor", "critic")) -> list[str]:
    """Overrides of several roles' settings."""
    return [f"{role}.{setting}" for role in roles for setting in settings]


SMALL_BATCHES = of_roles("ppo_mini_batch_size=4", "ppo_micro_batch_size_per_gpu=1")
MOVED = of_roles(
    "megatron.offload={parameters: true, gradients: true, optimizer: true}",
    "megatron.offload_activations=true",
)
STAGES = of_roles(
    "megatron.tensor_model_parallel_size=1", "megatron.pipeline_model_parallel_size=2"
)
ONE_ROLE = ("algorithm.adv_estimator=grpo", "rollout.n=2", "data.train_batch_size=2",
            "actor.ppo_mini_batch_size=2")  # fmt: skip


@dataclass(frozen=True)
class Program:
    """What the ranks do into which mistakes are planted.

    Args:
        case: makes the case.
        ranks: the ranks that are simulated.
    """

    case: Callable[[], RankCase]
    ranks: tuple[int, ...]


def _two_roles() -> RankCase:
    return small_case(
        *SHORT, *SMALL_BATCHES, *STAGES, *MOVED,
        "trainer.n_gpus_per_node=4", "data.train_batch_size=8", "rollout.n=1",
    )  # fmt: skip


def _one_role() -> RankCase:
    return small_case(
        *SHORT, *SMALL_BATCHES, *STAGES, *MOVED, *ONE_ROLE, "trainer.n_gpus_per_node=4"
    )


def _interleaved() -> RankCase:
    return small_case(
        *SHORT, *SMALL_BATCHES, *STAGES,
        *of_roles("megatron.virtual_pipeline_model_parallel_size=2"),
        "trainer.n_gpus_per_node=2", "data.train_batch_size=4", "rollout.n=1",
    )  # fmt: skip


def _mixture() -> RankCase:
    return sized(loaded(
        "recipes/qwen3_30b_a3b_gsm8k_math.yaml", *SHORT, *SMALL_BATCHES, *ONE_ROLE,
        *of_roles("megatron.tensor_model_parallel_size=1",
                  "megatron.pipeline_model_parallel_size=1",
                  "megatron.context_parallel_size=2", "megatron.expert_model_parallel_size=2",
                  "megatron.cp_comm_type=p2p", "use_dynamic_bsz=false",
                  "ppo_max_token_len_per_gpu=null"),
        "actor.router_replay=off", "trainer.nnodes=1", "trainer.n_gpus_per_node=4",
        "actor.ppo_micro_batch_size_per_gpu=2",
    ), num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, head_dim=32)  # fmt: skip


PROGRAMS = {
    "two roles": Program(_two_roles, (0, 1, 2, 3)),
    "one role": Program(_one_role, (0, 1, 2, 3)),
    "interleaved": Program(_interleaved, (0, 1)),
    "mixture": Program(_mixture, (0, 1, 2)),
}


def recorded(make: Callable[[], None] | None, rank: int, case: RankCase) -> RankRecord:
    """Make a mistake in this process, and simulate a rank."""
    import mppo.simulation.other_ranks  # noqa: F401  first: it keeps what the mistake replaces
    from mppo.models import offload

    offload.AHEAD = 0  # else so small a model keeps all activations
    if make is not None:
        make()
    return simulate_rank(replace(case, rank=rank)).record


@cache
def clean(name: str) -> tuple[RankCase, dict[int, RankRecord]]:
    """A program's case and the records of its ranks, without a mistake."""
    program = PROGRAMS[name]
    case = replace(with_layers(program.case(), 1), uneven=True, record=True)
    return case, {rank: isolated(recorded, None, rank, case) for rank in program.ranks}


def run(name: str) -> dict[str, Any]:
    """What is found among a program's ranks, some of which make a mistake."""
    mistake = MISTAKES.get(name)
    case, records = clean(name if mistake is None else mistake.program)
    if mistake is not None:
        wrong = {rank: isolated(recorded, mistake.make, rank, case) for rank in mistake.ranks}
        records = records | wrong
    rules = rules_of(case.recipe, case.world_size)
    found = find(list(records.values()), [])
    if not found.found:
        found = find(list(records.values()), rules)
    return {
        "mismatches": [one.describe() for one in found.mismatches],
        "races": found.races,
        "hangs": [one.describe() for one in found.hangs],
    }


if __name__ == "__main__":
    os.environ.pop("MPPO_DEVICE", None)
    warnings.simplefilter("ignore")
    from mppo.simulation.run import import_simulated_code

    import_simulated_code()
    for name in sys.argv[1:]:
        try:
            found = run(name)
        except SimulationError as error:
            found = {"error": str(error), "stack": error.stack}
        print(json.dumps({"name": name, **found}), flush=True)

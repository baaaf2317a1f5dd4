"""Mistakes between ranks and streams, each planted into the simulated processes of a small model.

``python tests/planted.py NAME...`` prints one line of JSON per name of ``CLEAN`` or ``PLANTED``.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planted_mistakes import BETWEEN_REPLICAS, BETWEEN_STAGES, RACES
from simulated import small_case

from mppo.simulation.case import RankCase
from mppo.simulation.isolated import SimulationError, isolated
from mppo.simulation.quick import with_layers
from mppo.simulation.rank import simulate_rank
from mppo.simulation.records import RankRecord
from mppo.simulation.together.findings import find
from mppo.simulation.together.run import rules_of

MOVED = "{parameters: true, gradients: true, optimizer: true}"
SETTINGS = (
    "trainer.n_gpus_per_node=4", "data.train_batch_size=8", "rollout.n=1",
    "data.max_prompt_length=64", "data.max_response_length=64",
    *(f"{role}.{setting}" for role in ("actor", "critic") for setting in (
        "ppo_mini_batch_size=4", "ppo_micro_batch_size_per_gpu=1",
        "megatron.tensor_model_parallel_size=1", "megatron.pipeline_model_parallel_size=2",
        f"megatron.offload={MOVED}", "megatron.offload_activations=true",
    )),
)  # fmt: skip
"""Two stages of two ranks, two mini-batches of two micro-batches; everything moves to the host."""


def case(*overrides: str, layers: int = 1) -> RankCase:
    """A small model on four ranks."""
    return replace(with_layers(small_case(*SETTINGS, *overrides), layers), uneven=True, record=True)


@dataclass(frozen=True)
class Planted:
    """A mistake.

    Args:
        make: makes the mistake in a rank's process.
        ranks: the ranks that are simulated.
    """

    make: Callable[[int], None]
    ranks: tuple[int, ...]


PLANTED = {
    make.__name__: Planted(make, ranks)
    for made, ranks in ((RACES, (0,)), (BETWEEN_STAGES, (0, 2)), (BETWEEN_REPLICAS, (0, 1)))
    for make in made
}


def recorded(planted: Planted | None, rank: int, simulated: RankCase) -> RankRecord:
    """Make a mistake in this process, and simulate a rank."""
    import mppo.simulation.other_ranks  # noqa: F401  first: it keeps what the mistake replaces

    if planted is not None:
        planted.make(rank)
    return simulate_rank(replace(simulated, rank=rank)).record


def run(planted: Planted | None, ranks: Sequence[int], *overrides: str) -> dict[str, Any]:
    """What is found among some ranks."""
    simulated = case(*overrides)
    records = [isolated(recorded, planted, rank, simulated) for rank in ranks]
    found = find(records, rules_of(simulated.recipe, simulated.world_size))
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
        planted = PLANTED.get(name)
        try:
            found = run(planted, planted.ranks if planted else range(4))
        except SimulationError as error:
            found = {"error": str(error), "stack": error.stack}
        print(json.dumps({"name": name, **found}), flush=True)

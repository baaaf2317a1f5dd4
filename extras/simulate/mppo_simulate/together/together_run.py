"""The simulation of all ranks together, by a few that stand for all."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mppo.hub.model_config import ModelConfigs
from mppo.parallel.environment import QUEUES_INTERLEAVED
from mppo.pipeline.deadlock import Rules
from mppo.planning.fit import plan_fit
from mppo.planning.run_plan import plan_roles, with_token_budgets
from mppo.recipe.gpu_types import GpuType
from mppo.recipe.schema import Recipe
from mppo_simulate.case import RankCase
from mppo_simulate.isolated import SimulationError, isolated_each
from mppo_simulate.options import Options
from mppo_simulate.quick import chunk_depths, fewest_layers, reduced_batch, with_layers
from mppo_simulate.rank import simulate_rank
from mppo_simulate.records import RankRecord
from mppo_simulate.run import import_simulated_code
from mppo_simulate.together.choice import representative_ranks
from mppo_simulate.together.findings import find
from mppo_simulate.together.together_report import describe_findings, describe_record

_MINI_BATCHES = 2
"""Of a quick run: the second one's passes begin before the first one's end."""


def simulate_all(
    recipe: Recipe, configs: ModelConfigs, world_size: int, gpu: GpuType, options: Options
) -> bool:
    """Simulate ranks that stand for all, and print what they do to each other.

    Returns:
        Whether nothing was found.

    Raises:
        SystemExit: the simulated code failed; code 1.
    """
    hf_configs = {role.name: configs.read(role.path) for role in recipe.roles()}
    recipe = with_token_budgets(recipe, world_size, hf_configs)
    fit = plan_fit(recipe, plan_roles(recipe, world_size, hf_configs), gpu)
    per_node = recipe.trainer.n_gpus_per_node or 8
    with_te = options.transformer_engine is not None
    case = RankCase(
        recipe, hf_configs, world_size, 0, options.steps, gpu, per_node, with_te, fit.table
    )
    case = shortened(case) if options.quick else case
    ranks = representative_ranks(recipe, world_size)
    shown = ", ".join(map(str, ranks))
    print(f"# {len(ranks)} of {world_size} ranks stand for all: {shown}", flush=True)
    import_simulated_code()
    records = []
    try:
        for record in record_ranks(case, ranks, options.at_once):
            print(describe_record(record), flush=True)
            records.append(record)
    except SimulationError as error:
        print(error.stack, file=sys.stderr)
        print(f"mppo: rank {ranks[len(records)]} fails {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    rules = rules_of(recipe, world_size)
    findings = find(records, rules)
    print(describe_findings(findings, records, rules), flush=True)
    return not findings.found


def shortened(case: RankCase) -> RankCase:
    """The case with few layers in every pipeline chunk, and two small mini-batches."""
    recipe = reduced_batch(case.recipe, case.world_size)
    full = case.recipe.data.train_batch_size
    prompts = min(full, _MINI_BATCHES * recipe.data.train_batch_size)
    data = recipe.data.model_copy(update={"train_batch_size": prompts})
    fewer = replace(case, recipe=recipe.model_copy(update={"data": data}))
    return fewer if chunk_depths(case) is None else with_layers(fewer, fewest_layers(case))


def record_ranks(case: RankCase, ranks: Sequence[int], at_once: int = 2) -> Iterator[RankRecord]:
    """Simulate ranks, each in its own process, and yield their records.

    Args:
        case: what to simulate.
        ranks: which ranks.
        at_once: number of processes at the same time.
    """
    cases = [replace(case, rank=rank, record=True, uneven=True) for rank in ranks]
    yield from isolated_each(_record, cases, at_once)


def _record(case: RankCase) -> RankRecord:
    return simulate_rank(case).record


def rules_of(recipe: Recipe, world_size: int) -> list[Rules]:
    """The rules under which a recipe's ranks must not hang.

    Process groups have a communicator per pair of ranks (``mppo.parallel.process_group``). With
    interleaving there are 32 queues, and hardly any schedule bears a wait for the whole device in
    every pass (``mppo.pipeline.schedule``).
    """
    layouts = [role.megatron.layout(world_size) for role in recipe.roles()]
    interleaved = any(layout.vpp > 1 for layout in layouts)
    queues = (QUEUES_INTERLEAVED,) if interleaved else (1, 8, 32)
    waits = ("nothing", "stream") if interleaved else ("nothing", "stream", "device")
    return [
        Rules(rendezvous, True, count, host_waits)
        for rendezvous in (True, False)
        for count in queues
        for host_waits in waits
    ]

"""Simulation of one or more ranks of a recipe, one after the other, with printed reports."""

from __future__ import annotations

import sys
from functools import partial

from mppo.hub.model_config import ModelConfigs
from mppo.planning.fit import plan_fit
from mppo.planning.run_plan import plan_roles, with_token_budgets
from mppo.planning.verdict import describe_verdict, judge
from mppo.recipe.gpu_types import GpuType
from mppo.recipe.schema import Recipe
from mppo_simulate.case import RankCase
from mppo_simulate.isolated import SimulationError, isolated
from mppo_simulate.moments import simulated_moments
from mppo_simulate.options import Options
from mppo_simulate.quick import quick_result
from mppo_simulate.rank import RankResult, simulate_rank
from mppo_simulate.report import describe_rank
from mppo_simulate.timeline import write_memory_trace


def simulate_run(
    recipe: Recipe,
    configs: ModelConfigs,
    world_size: int,
    gpu: GpuType,
    options: Options,
) -> bool:
    """Simulate the ranks that the options select, and print a report on each.

    Returns:
        Whether all these ranks fit the GPU.

    Raises:
        SystemExit: the simulated code failed; code 1.
    """
    hf_configs = {role.name: configs.read(role.path) for role in recipe.roles()}
    recipe = with_token_budgets(recipe, world_size, hf_configs)
    fit, all_fit = plan_fit(recipe, plan_roles(recipe, world_size, hf_configs), gpu), True
    import_simulated_code()
    per_node = recipe.trainer.n_gpus_per_node or 8
    for rank in ranks_to_simulate(recipe, world_size, options):
        with_te = options.transformer_engine is not None
        case = RankCase(
            recipe, hf_configs, world_size, rank, options.steps, gpu, per_node, with_te, fit.table
        )  # with the table: the smaller models of a quick run would need no offload
        result = _result(case, options.quick)
        print(describe_rank(result, recipe, world_size), end="\n\n", flush=True)
        moments = simulated_moments(result, recipe, fit.engine)
        verdict = judge(moments, recipe, gpu, fit.engine)
        print(describe_verdict(verdict), end="\n\n", flush=True)
        all_fit &= verdict.fits
        if options.timeline is not None:
            write_memory_trace(options.timeline, result)
    return all_fit


def ranks_to_simulate(recipe: Recipe, world_size: int, options: Options) -> list[int]:
    """List the selected rank, or the first rank of every stage of the longest pipeline."""
    if not options.all_stages:
        return [options.rank]
    layouts = [role.megatron.layout(world_size) for role in recipe.roles()]
    deepest = max(layouts, key=lambda layout: layout.pp)
    first: dict[int, int] = {}
    for rank in range(world_size):
        first.setdefault(deepest.coordinates(rank).pp, rank)
    return [first[stage] for stage in sorted(first)]


def import_simulated_code() -> None:
    """Import the simulated code once; the processes forked from this one share it."""
    import mppo.checkpoint.role_state
    import mppo.trainer.update.update_stage  # noqa: F401


def _result(case: RankCase, quick: bool) -> RankResult:
    run = partial(isolated, simulate_rank)
    try:
        return quick_result(case, run) if quick else run(case)
    except SimulationError as error:
        print(error.stack, file=sys.stderr)
        print(f"mppo: rank {case.rank} fails {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None

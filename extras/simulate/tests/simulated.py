"""Ranks of the shipped recipes and of a small model, simulated in one process without Megatron's
stand-ins for the CPU; prints one line of JSON per case.

``python simulated.py CASE...`` with the names of ``CASES``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mppo_simulate.case import RankCase
from mppo_simulate.gpu import te_stand_in
from mppo_simulate.isolated import SimulationError, isolated
from mppo_simulate.moments import simulated_moments
from mppo_simulate.quick import (
    chunk_depths,
    extrapolated,
    fewest_layers,
    quick_result,
    reduced_batch,
    with_layers,
)
from mppo_simulate.rank import LASTING_BUFFERS, RankResult, simulate_rank
from recipe_list import FULL_DEPTH
from simulated_resume import saved_and_loaded

from mppo.hub.model_config import ModelConfigs
from mppo.planning.fit import NOTHING, plan_fit, planned_gpu
from mppo.planning.peaks import RankUse
from mppo.planning.residency import ON_DEVICE, Residency, residency
from mppo.planning.run_plan import plan_roles, plan_use
from mppo.planning.verdict import describe_verdict, judge
from mppo.recipe.gpu_types import find_gpu
from mppo.recipe.rules.rule import world_size_of
from mppo.trainer.start.loading import load_checked

ROOT = Path(__file__).parents[3]
TE_FOLDER = os.environ.get("MPPO_TEST_TE_FOLDER", "")
"""Folder with Transformer Engine's Python, for a process in which it is installed."""
NAMED_GPUS = ("a100-80gb", "h100-80gb")
"""The GPUs that the shipped recipes fit (``docs/memory.md``)."""
SMALL_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 5,
    "vocab_size": 4096,
}
ALONE = ("trainer.n_gpus_per_node=1", "data.train_batch_size=32", "actor.ppo_mini_batch_size=32",
         "actor.megatron.tensor_model_parallel_size=1",
         "critic.megatron.tensor_model_parallel_size=1")  # fmt: skip
"""One rank, which has all tensors of a checkpoint."""
DEPTH = 8
"""Layers of the small model with other settings."""
SMALL = ("recipes/qwen2_7b_rm.yaml", "data.train_batch_size=128", "actor.ppo_mini_batch_size=128",
         "critic.megatron.recompute_granularity=none", "reward_model.enable=false")  # fmt: skip


STORED = ("actor.megatron.recompute_granularity=none",
          "critic.megatron.recompute_granularity=selective")  # fmt: skip
CHANGED = {
    # twelve sequences instead of eleven, as the critic's: 96 fill all micro-batches, not all 512
    "qwen2_7b_rm_seq_balance": ("reward_model.forward_max_token_len_per_gpu=98316",),
}
"""Small changes of recipes, with which their simulation takes a sixth of the time."""
CUT = {"deepseek_llm_7b_gsm8k_cp2": 8}
"""Layers of recipes that are compared in quick mode and in full: twice those of the quick runs."""


def recipe_case(recipe: str, last: bool = False, overrides: tuple[str, ...] = ()) -> RankCase:
    """A shipped recipe on its first or last stage, placed."""
    changed = (*CHANGED.get(recipe, ()), *overrides)
    return stage_case(placed(loaded(f"recipes/{recipe}.yaml", *changed)), last)


def shallow(case: RankCase, periods: int = 0) -> RankCase:
    """The case with few micro-batches, and the fewest layers in every pipeline chunk among which is
    every kind of layer, or some periods of layers more; a recipe with hardly more keeps its own."""
    fewer, depths = replace(case, recipe=reduced_batch(case.recipe, case.world_size)), None
    if (depths := chunk_depths(case)) is None:
        return fewer
    return with_layers(fewer, fewest_layers(case) + periods * (depths.second - depths.first))


def at_full_depth(case: RankCase, result: RankResult) -> RankResult:
    """The result of ``shallow(case)``, scaled to the case's depth by one deeper run."""
    depths = chunk_depths(case)
    if depths is None:
        return result
    first = fewest_layers(case)
    depths = replace(depths, first=first, second=first + depths.second - depths.first)
    deeper = isolated(simulate_rank, shallow(case, periods=1))
    return extrapolated(result, deeper, depths, case.recipe.rollout.sync_bucket_mb << 20)


def verdicts(case: RankCase, result: RankResult) -> dict[str, dict[str, Any]]:
    """Whether the simulated rank fits in every phase, by type of GPU.

    Args:
        case: a recipe at its full depth, placed.
        result: of the same depth.
    """
    plans = plan_roles(case.recipe, case.world_size, case.hf_configs)
    found = {}
    for gpu in (case.gpu, *map(find_gpu, NAMED_GPUS)):
        fit = plan_fit(case.recipe, plans, gpu)
        moments = simulated_moments(result, case.recipe, fit.engine)
        verdict = judge(moments, case.recipe, gpu, fit.engine)
        found[gpu.name] = {
            "fits": verdict.fits,
            "phases": [moment.phase for moment in moments],
            "same table": fit.table == case.table,
            "text": describe_verdict(verdict),
        }
    return found


def stage_case(case: RankCase, last: bool) -> RankCase:
    """The same recipe on the first rank of the longest pipeline's first or last stage."""
    layouts = [role.megatron.layout(case.world_size) for role in case.recipe.roles()]
    layout = max(layouts, key=lambda layout: layout.pp)
    stage, ranks = layout.pp - 1 if last else 0, range(case.world_size)
    return replace(case, rank=next(r for r in ranks if layout.coordinates(r).pp == stage))


def small_case(*overrides: str) -> RankCase:
    """A shipped recipe on a model of a few million parameters and seven layers."""
    return sized(loaded(*SMALL, *overrides))


def sized(case: RankCase, **more: int) -> RankCase:
    """The case with models of ``SMALL_SIZES`` and of other sizes."""
    for config in case.hf_configs.values():
        for name, value in (SMALL_SIZES | more).items():
            setattr(config, name, value)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
    return case


def placed(case: RankCase) -> RankCase:
    """The case with the table that the plan chooses for the recipe at its full depth."""
    plans = plan_roles(case.recipe, case.world_size, case.hf_configs)
    return replace(case, table=plan_fit(case.recipe, plans, case.gpu).table)


def loaded(path: str, *overrides: str) -> RankCase:
    """A recipe's first rank, one step."""
    configs = ModelConfigs(ROOT / path)
    recipe = load_checked(ROOT / path, overrides, None, configs.read, files=False)
    hf_configs = {role.name: configs.read(role.path) for role in recipe.roles()}
    gpu, world = planned_gpu(recipe), world_size_of(recipe)
    return RankCase(recipe, hf_configs, world, 0, 1, gpu, transformer_engine=bool(TE_FOLDER))


# Mistakes that no test on a CPU can see. Each is made in a forked process and ends with it.


def targets_left_on_the_host() -> None:
    from mppo.trainer.update import objectives

    objectives.on_device = lambda targets: targets


def tokens_not_moved() -> None:
    from mppo.models import role

    plain = role.cut

    def cut(*args: Any) -> Any:
        found = plain(*args)
        return replace(found, tokens_t=found.tokens_t.cpu())

    role.cut = cut


def weights_gathered_over_the_wrong_group() -> None:
    from mppo.parallel.groups import LayoutGroups

    plain = LayoutGroups.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.tp = self.pp

    LayoutGroups.__init__ = init


def gradients_allocated_twice() -> None:
    from mppo.models import role

    plain = role.wrap_in_ddp

    def wrap(*args: Any) -> Any:
        chunks = plain(*args)
        for chunk in chunks:
            chunk.second = [torch.empty_like(buffer.grad_data) for buffer in chunk.buffers]
        return chunks

    role.wrap_in_ddp = wrap


MISTAKES: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        targets_left_on_the_host,
        tokens_not_moved,
        weights_gathered_over_the_wrong_group,
        gradients_allocated_twice,
    )
}


def with_mistake(make: Callable[[], None], case: RankCase) -> RankResult:
    import mppo_simulate.other_ranks  # noqa: F401  first: it keeps what the mistake replaces

    make()
    return simulate_rank(case)


def summary(case: RankCase, result: RankResult) -> dict[str, Any]:
    """What the tests compare: bytes, counts per micro-batch, and the plan of the same case."""
    plans = plan_roles(case.recipe, case.world_size, case.hf_configs)
    stages = [plan.memory[plan.layout.coordinates(case.rank).pp] for plan in plans]
    use = plan_use(case.recipe, plans, case.rank)
    table = case.table or plan_fit(case.recipe, plans, case.gpu).table
    staying = residency(case.recipe, dict.fromkeys(use.parts, NOTHING))
    return {
        "communicators": (result.communicators, use.communicators),
        "resident": result.resident.total() - sum(result.resident[x] for x in LASTING_BUFFERS),
        "buffers": (sum(result.resident[x] for x in LASTING_BUFFERS), use.buffers),
        "held": dict(result.resident),
        "peaks": {phase.name: result.lasting_peak(phase) for phase in result.phases},
        "composition": {phase.name: dict(phase.composition) for phase in result.phases},
        "pinned": result.pinned.total(),
        "planned_peaks": planned_peaks(use, table, result),
        "planned_without_offload": planned_peaks(use, staying, result),
        "operations": {p.name: p.operations / (p.micro_batches or 1) for p in result.phases},
        "waits": {
            p.name: sum(p.waits.values()) / p.micro_batches
            for p in result.phases
            if p.micro_batches
        },
        "host_waits": {p.name: sum(p.waits.values()) for p in result.phases if p.micro_batches},
        "waiting": {p.name: {w.line: count for w, count in p.waits.items()} for p in result.phases},
        "planned": sum(use.role_bytes(name, table["generation"], ON_DEVICE) for name in use.parts),
        "whole": sum(m.resident for m in stages),
        "planned_host": use.host(table),
        "roles": {
            plan.role.name: (m.weights, m.gradients, m.optimizer) for plan, m in zip(plans, stages)
        },
    }


def planned_peaks(use: RankUse, table: Residency, result: RankResult) -> dict[str, int]:
    """The plan's peaks by the names of the simulated phases that it covers."""
    planned = {one.name: use.peak(one, table) for one in use.uses}
    # an optimizer step allocates nothing
    planned |= {
        one.name.replace("updating", "stepping"): use.peak(replace(one, extra=0), table)
        for one in use.uses
        if one.name.startswith("updating")
    }
    found = {"weight sync": planned["weight sync"]}
    for phase in result.phases:
        kind, *words = phase.name.replace(",", "").split()
        kind = "forward passes of" if kind == "computing" else kind
        for role in use.parts.keys() & set(words):
            found[phase.name] = planned[f"{kind} {role}"]
    return found


def run(name: str) -> dict[str, Any]:
    """The summary of a case, or its error."""
    kind, _, what = name.partition(":")
    try:
        if kind == "mistake":
            case = with_layers(small_case(), 2)
            return summary(case, isolated(with_mistake, MISTAKES[what], case))
        if kind == "shallow":
            case = with_layers(small_case(), 2)
            return summary(case, isolated(simulate_rank, case))
        if kind == "with":
            case = with_layers(small_case(*what.split()), DEPTH)
            return summary(case, isolated(simulate_rank, case))
        if kind == "resumed":
            case = with_layers(small_case(*ALONE, *what.split()), 2)
            with tempfile.TemporaryDirectory() as folder:
                return isolated(saved_and_loaded, case, Path(folder) / "saved")
        if kind in ("full", "quick"):
            case = small_case() if what == "small" else placed(loaded(f"recipes/{what}.yaml"))
            if what in CUT:
                case = with_layers(case, CUT[what])
            once = partial(isolated, simulate_rank)
            result = once(case) if kind == "full" else quick_result(case, once)
            return summary(case, result)
        case = recipe_case(what, kind == "last", STORED if kind == "stored" else ())
        result = isolated(simulate_rank, shallow(case))
        found = summary(shallow(case), result)
        if not TE_FOLDER and name in FULL_DEPTH:
            found["verdicts"] = verdicts(case, at_full_depth(case, result))
        return found
    except SimulationError as error:
        return {"error": str(error), "stack": error.stack}


if __name__ == "__main__":
    os.environ.pop("MPPO_DEVICE", None)
    warnings.simplefilter("ignore")
    if TE_FOLDER:
        te_stand_in.install(Path(TE_FOLDER))
    from mppo_simulate.run import import_simulated_code

    import_simulated_code()
    for name in sys.argv[1:]:
        print(json.dumps({"name": name, **run(name)}), flush=True)

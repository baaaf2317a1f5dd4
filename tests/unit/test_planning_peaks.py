"""What a rank holds besides its parts: buffers that roles share, and an engine that is awake."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_planning_residency import APART, LARGE, ROOT, fit_of, plans_of

from mppo.planning.peaks import RankPart, rank_use
from mppo.planning.residency import GENERATION
from mppo.planning.verdict import beside_trainer, judge
from mppo.recipe.gpu_types import GpuType

REWARDED = "reward_model.path=builtin:tiny-reward"


def test_roles_of_other_pipelines_share_the_buffers_of_transformer_engine():
    """Its tensors belong to shapes of weights, not to layouts; here in bytes by hand."""
    chosen, plans = plans_of(ROOT / "recipes" / f"{LARGE}.yaml", *APART)
    kinds = [replace(plan.passes[0].kind, transformer_engine=True) for plan in plans]
    parts = [
        RankPart(plan.memory[0], replace(plan.passes[0], kind=kind))
        for plan, kind in zip(plans, kinds)
    ]
    hidden, attention, ffn = 5120, 128 * (40 // 8), 27648 // 8
    weights = [(attention + 2 * 128) * hidden, hidden * attention, 2 * ffn * hidden, hidden * ffn]
    expected = (32 << 20) + 1024 + 2 * sum(weights)
    assert rank_use(chosen, parts, 0, rank=0).buffers == expected
    assert rank_use(chosen, parts[:1], 0, rank=0).buffers == expected


def test_a_buffer_of_megatron_belongs_to_a_layout():
    chosen, plans = plans_of(ROOT / "recipes" / f"{LARGE}.yaml", *APART)
    parts = [RankPart(plan.memory[0], plan.passes[0]) for plan in plans]
    each = [rank_use(chosen, [part], 0, rank=0).buffers for part in parts]
    assert rank_use(chosen, parts, 0, rank=0).buffers == sum(each) > max(each)


@pytest.mark.parametrize("phase", ["forward passes of reward_model",
                                   "computing scores with reward_model"])  # fmt: skip
def test_the_reward_model_scores_beside_an_engine_that_is_awake(phase):
    """In validation it scores between generations, in the plan's phase and in the simulated one."""
    engine = fit_of("h100-80gb", LARGE, *APART).engine
    awake = beside_trainer(phase, {"NCCL": 7}, engine)
    assert awake == beside_trainer(GENERATION, {"NCCL": 7}, engine)
    assert awake == {"NCCL": 7, **engine.generating}
    assert sum(awake.values()) > sum(beside_trainer("updating actor", {"NCCL": 7}, engine).values())


def test_a_reward_model_that_does_not_fit_beside_the_kv_cache_is_told():
    fit = fit_of("h200-141gb", LARGE, *APART, REWARDED)
    moments = {moment.phase: moment for moment in fit.verdict.moments}
    scoring = moments.pop("forward passes of reward_model")
    assert any(name.startswith("KV cache") for name in scoring.beside)
    assert scoring.total > max(moment.total for moment in moments.values())
    chosen, _ = plans_of(ROOT / "recipes" / f"{LARGE}.yaml", *APART, REWARDED)
    for nbytes, fits in ((scoring.total, True), (scoring.total - 1, False)):
        gpu = GpuType("GPU", nbytes)
        verdict = judge([scoring, *moments.values()], chosen, gpu, fit.engine)
        assert (verdict.over <= 0) == fits
        assert verdict.moments[0] is scoring

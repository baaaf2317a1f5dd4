"""A critic with frozen parameters: the same numbers in every layout, and no state for them."""

from __future__ import annotations

import pytest
import torch
from layout_case import Case, build_role, compare, pairs_of, run_cases, run_matrix

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
ATTENTION = {"freeze": ("self_attn",)}
LAYOUTS = {
    "DP4": {},
    "TP2": {TP: 2},
    "TP2 without sequence parallelism": {TP: 2, "sequence_parallel": False},
    "CP2": {"context_parallel_size": 2},
    "PP4": {PP: 4},
    "TP2xPP2xVPP2, full recompute": {
        TP: 2, PP: 2, "virtual_pipeline_model_parallel_size": 2, "recompute_granularity": "full",
    },
    "DP4, state not sharded": {"use_distributed_optimizer": False},
    "TP2xEP2xPP2": {TP: 2, PP: 2, "expert_model_parallel_size": 2},
}  # fmt: skip
REFERENCES = {
    "attention": Case("qwen2", head="value", role=ATTENTION),
    "attention with biases": Case("gpt_neox", head="value", role={"freeze": ("attention",)}),
    "the upper half but its norms": Case(
        "qwen2", head="value", role={"freeze": (r"layers\.[23]\.(mlp|self_attn)", "model.norm")}
    ),
    "attention of a mixture": Case("qwen3_moe", head="value", role=ATTENTION),
    "experts": Case("qwen3_moe", head="value", role={"freeze": (r"experts\.\d+",)}),
}
CHOSEN = {
    "attention": [name for name in LAYOUTS if "EP" not in name],
    "attention with biases": ["TP2", "PP4"],
    "the upper half but its norms": ["PP4", "TP2xPP2xVPP2, full recompute"],
    "attention of a mixture": ["TP2xEP2xPP2"],
    "experts": ["TP2xEP2xPP2", "DP4"],
}
STEM = {
    "attention": "self_attn", "attention with biases": "attention",
    "attention of a mixture": "self_attn", "experts": ".experts.",
}  # fmt: skip
"""What the names of frozen parameters, and no others, hold."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_matrix(REFERENCES, LAYOUTS, CHOSEN, tmp_path_factory.mktemp("frozen"))


@pytest.mark.parametrize("pair", pairs_of(CHOSEN), ids=" ".join)
def test_every_layout_trains_like_one_process(pair, outcomes):
    alone, together = outcomes
    compare(together[pair], alone[pair[0]])


@pytest.mark.parametrize("name", STEM)
def test_frozen_parameters_keep_their_values_and_all_others_change(name, outcomes):
    run = outcomes[0][name]
    assert any(STEM[name] in key for key in run.weights)
    for key, weight in run.weights.items():
        assert torch.equal(weight, run.initial[key]) == (STEM[name] in key), key
    assert run.losses[1] < run.losses[0]


def moments(case, folder, registry):
    """Numbers of the rank's optimizer state, and those of its gradient buffers."""
    role = build_role(case, folder, registry)
    states = [s for part in role.optimizer.parts for s in part.optimizer.state.values()]
    buffers = [b for c in role.chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    return sum(s["exp_avg"].numel() for s in states), sum(b.grad_data.numel() for b in buffers)


def test_what_is_frozen_has_neither_moments_nor_gradients(tmp_path):
    cases = [Case("qwen2", head="value"), Case("qwen2", head="value", role=ATTENTION)]
    (everything, buffers), (trained, smaller) = run_cases(cases, 1, tmp_path, run=moments)
    # hidden 32, 4 heads, 2 key-value heads of 8: q, k, v with biases, o; four layers
    attention = 4 * (32 * 32 + 32 + 2 * (16 * 32 + 16) + 32 * 32)
    assert everything - trained == attention
    assert buffers - smaller == pytest.approx(attention, abs=512), "but for padding"

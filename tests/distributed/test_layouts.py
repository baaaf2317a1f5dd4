"""Dense models: the same loss, gradient norm and updated weights in every layout."""

from __future__ import annotations

import pytest
import torch
from layout_case import Case, run_cases

TP = "tensor_model_parallel_size"
PP = "pipeline_model_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"

LAYOUTS = {
    "DP4": {},
    "DP4, state not sharded": {"use_distributed_optimizer": False},
    "DP4, overlapped reduce": {"overlap_grad_reduce": True},
    "TP2": {TP: 2},
    "TP2 without sequence parallelism": {TP: 2, "sequence_parallel": False},
    "TP4 with 2 KV heads": {TP: 4},
    "PP2": {PP: 2},
    "PP4": {PP: 4},
    "TP2 x PP2": {TP: 2, PP: 2},
    "PP2 x VPP2": {PP: 2, VPP: 2},
    "TP2 x PP2 x VPP2, full recompute": {TP: 2, PP: 2, VPP: 2, "recompute_granularity": "full"},
    "PP2, selective recompute": {PP: 2, "recompute_granularity": "selective"},
    "PP2, uneven": {PP: 2, "num_layers_in_first_pipeline_stage": 1},
}
REFERENCES = [
    Case("qwen2"),
    Case("qwen2_tied"),
    Case("qwen2", head="value"),
    Case("llama"),
]
VARIANTS = (
    [Case("qwen2", layout) for layout in LAYOUTS.values()]
    + [Case("qwen2", LAYOUTS["DP4"], micro_batch=1), Case("qwen2", LAYOUTS["PP2"], micro_batch=7)]
    + [Case("qwen2_tied", LAYOUTS[name]) for name in ("TP4 with 2 KV heads", "TP2 x PP2", "PP4")]
    + [
        Case("qwen2", LAYOUTS[name], head="value")
        for name in ("DP4", "TP2", "TP2 without sequence parallelism", "PP4", "TP2 x PP2")
    ]
    + [Case("llama", LAYOUTS["TP2 x PP2"])]
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The references in one process, and every variant on four."""
    folder = tmp_path_factory.mktemp("layouts")
    alone = {(c.model, c.head): o for c, o in zip(REFERENCES, run_cases(REFERENCES, 1, folder))}
    return alone, run_cases(VARIANTS, 4, folder)


@pytest.mark.parametrize(
    "index", range(len(VARIANTS)), ids=lambda i: f"{VARIANTS[i].model}-{VARIANTS[i].megatron}"
)
def test_every_layout_gives_the_numbers_of_one_process(outcomes, index):
    alone, variants = outcomes
    case, got = VARIANTS[index], variants[index]
    want = alone[case.model, case.head]
    for measured, reference in zip(got.measured, want.measured):
        torch.testing.assert_close(measured, reference, rtol=1e-5, atol=1e-5)
    assert got.losses == pytest.approx(want.losses, rel=1e-5, abs=1e-6)
    assert got.norms == pytest.approx(want.norms, rel=1e-5)
    assert got.weights.keys() == want.weights.keys()
    for name, weight in got.weights.items():
        torch.testing.assert_close(weight, want.weights[name], rtol=1e-5, atol=2e-6, msg=name)


def test_the_reference_learns_something(outcomes):
    alone, _ = outcomes
    for outcome in alone.values():
        assert outcome.norms[0] > 1e-3
        assert outcome.losses[1] < outcome.losses[0]

"""Dense models: the same loss, gradient norm and updated weights in every layout."""

from __future__ import annotations

import pytest
import torch
from layout_case import Case, batch_of, compare, objective, run_cases
from transformers import AutoModelForCausalLM

from mppo.batch.head_outputs import PolicyOutputs
from mppo.recipe.sections.roles import HLGaussConfig

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
    "CP2": {"context_parallel_size": 2},
}
HISTOGRAM = {"histogram": HLGaussConfig(bins=7, min=-0.5, max=2.0)}
REFERENCES = [
    Case("qwen2"),
    Case("qwen2_tied"),
    Case("qwen2", head="value"),
    Case("llama"),
    Case("llama_of_9_heads"),
    Case("gpt_neox"),
    Case("gpt_neox", head="value"),
    Case("opt"),
    Case("qwen2", head="value", role=HISTOGRAM),
]
POLICIES = [case.model for case in REFERENCES if case.head == "policy"]
VALUE_LAYOUTS = (
    "DP4", "TP2", "TP2 without sequence parallelism", "PP4", "TP2 x PP2", "PP2 x VPP2",
    "TP2 x PP2 x VPP2, full recompute",
)  # fmt: skip
HISTOGRAM_LAYOUTS = (
    "DP4", "TP2", "TP2 without sequence parallelism", "PP4", "CP2",
    "TP2 x PP2 x VPP2, full recompute",
)  # fmt: skip
PLAIN_LAYOUTS = (
    "DP4", "TP2 without sequence parallelism", "TP2 x PP2 x VPP2, full recompute",
    "PP2, selective recompute",
)  # fmt: skip
"""Of the families with biases, an ungated feed-forward and LayerNorm."""
VARIANTS = (
    [Case("qwen2", layout) for name, layout in LAYOUTS.items() if name != "CP2"]
    + [Case("qwen2", LAYOUTS["DP4"], micro_batch=1), Case("qwen2", LAYOUTS["PP2"], micro_batch=7)]
    + [Case("qwen2_tied", LAYOUTS[name]) for name in ("TP4 with 2 KV heads", "TP2 x PP2", "PP4")]
    + [Case("qwen2", LAYOUTS[name], head="value") for name in VALUE_LAYOUTS]
    + [Case("qwen2", LAYOUTS[name], token_budget=11) for name in ("DP4", "PP2 x VPP2")]
    + [Case("qwen2", LAYOUTS["TP2"], head="value", token_budget=20)]
    + [Case("qwen2", LAYOUTS[name], head="value", role=HISTOGRAM) for name in HISTOGRAM_LAYOUTS]
    + [Case("llama", LAYOUTS["TP2 x PP2"])]
    + [Case("gpt_neox", LAYOUTS[name]) for name in PLAIN_LAYOUTS]
    + [Case("gpt_neox", LAYOUTS["TP2 x PP2"], head="value")]
    + [Case("opt", LAYOUTS[name]) for name in ("TP2", *PLAIN_LAYOUTS[1:3])]
)


def key_of(case: Case) -> tuple[str, str, bool]:
    """What the numbers of a case depend on, whatever its layout."""
    return case.model, case.head, bool(case.role)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The references in one process, and every variant on four."""
    folder = tmp_path_factory.mktemp("layouts")
    alone = dict(zip(map(key_of, REFERENCES), run_cases(REFERENCES, 1, folder)))
    return alone, run_cases(VARIANTS, 4, folder), folder


@pytest.mark.parametrize(
    "index", range(len(VARIANTS)), ids=lambda i: f"{VARIANTS[i].model}-{VARIANTS[i].megatron}"
)
def test_every_layout_gives_the_numbers_of_one_process(outcomes, index):
    alone, variants, _ = outcomes
    case, got = VARIANTS[index], variants[index]
    want = alone[key_of(case)]
    for output, reference in zip(got.outputs, want.outputs):
        torch.testing.assert_close(output, reference, rtol=1e-5, atol=1e-5)
    assert got.losses == pytest.approx(want.losses, rel=1e-5, abs=1e-6)
    assert got.norms == pytest.approx(want.norms, rel=1e-5)
    assert got.weights.keys() == want.weights.keys()
    for name, weight in got.weights.items():
        torch.testing.assert_close(weight, want.weights[name], rtol=1e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize("model", POLICIES)
def test_one_process_takes_the_steps_of_plain_transformers_and_torch(outcomes, model):
    alone, _, folder = outcomes
    want = alone[model, "policy", False]
    network = AutoModelForCausalLM.from_pretrained(
        folder / model, dtype=torch.float32, attn_implementation="eager"
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.05, eps=0.01, weight_decay=0.0)
    batch = batch_of()
    loss_of = objective(batch)
    for step, norm in enumerate(want.norms):
        optimizer.zero_grad()
        outputs = [torch.zeros(len(batch.tokens_T)) for _ in range(2)]
        for start, stop in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:]):
            tokens = batch.tokens_T[start:stop]
            logp = (network(tokens[None]).logits[0, :-1] / 0.9).log_softmax(-1)
            outputs[0][start + 1 : stop] = logp.gather(1, tokens[1:, None])[:, 0]
            outputs[1][start + 1 : stop] = -(logp.exp() * logp).sum(-1)
        loss, _ = loss_of(PolicyOutputs(*outputs), range(batch.num_sequences))
        assert loss.item() == pytest.approx(want.losses[step], rel=1e-4, abs=1e-6)
        loss.backward()
        clipped = torch.nn.utils.clip_grad_norm_(network.parameters(), max_norm=1.0)
        assert norm == pytest.approx(clipped.item(), rel=1e-4)
        optimizer.step()
    assert max(want.norms) > 1.0, "some step is clipped"
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(
            want.weights[name], parameter.detach(), rtol=1e-4, atol=2e-5, msg=name
        )


def test_nine_heads_are_split_over_three_ranks(outcomes):
    alone, _, folder = outcomes
    (got,) = run_cases([Case("llama_of_9_heads", {TP: 3})], 3, folder)
    compare(got, alone["llama_of_9_heads", "policy", False])


def test_the_reference_learns_something(outcomes):
    alone, _, _ = outcomes
    for outcome in alone.values():
        assert outcome.norms[0] > 1e-3
        assert outcome.losses[1] < outcome.losses[0]

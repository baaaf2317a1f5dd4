"""A role is the same from a Hugging Face folder and from a Megatron checkpoint, in every layout;
a critic also from a reward model, with a value head of its own or a fresh one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as hf
from layout_case import Case, batch_of, compare, run_cases
from tiny_models import CONFIGS, save

from checkpoints_convert.__main__ import main

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP, EP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size"
ETP = "expert_tensor_parallel_size"
LAYOUTS = {
    "qwen2": {"TP4": {TP: 4}, "PP2xVPP2": {PP: 2, VPP: 2}, "TP2xPP2": {TP: 2, PP: 2}},
    "moonlight": {"TP2xEP2xETP2": {TP: 2, EP: 2, ETP: 2}, "PP2xEP2": {PP: 2, EP: 2}},
    "qwen2_moe": {"EP2xPP2": {EP: 2, PP: 2}},
    "gemma2": {"TP2xPP2": {TP: 2, PP: 2}},
}
REWARD_LAYOUTS = {"DP4": {}, "TP2xPP2": {TP: 2, PP: 2}, "PP4": {PP: 4}}
REWARD = {
    "qwen2": hf.Qwen2ForSequenceClassification,
    "qwen2_moe": hf.Qwen2MoeForSequenceClassification,
    "gemma2": hf.Gemma2ForSequenceClassification,
}
PAIRS = [(model, layout) for model, layouts in LAYOUTS.items() for layout in layouts]
REWARD_PAIRS = [
    (model, form, layout)
    for model in REWARD
    for form in ("reward", "reward_megatron")
    for layout in REWARD_LAYOUTS
]


FRESH = {
    "fresh value head": {"value_head_init": 0.3, "seed": 5},
    "of another seed": {"value_head_init": 0.3, "seed": 6},
    "twice as wide": {"value_head_init": 0.6, "seed": 5},
    "of zeros": {"value_head_init": 0.0, "seed": 5},
}


def to_megatron(source, target) -> None:
    arguments = ["--hf", str(source), "--megatron", str(target), "--no-tokenizer"]
    assert main(["hf-to-megatron", *arguments]) == 0


def save_reward_model(name: str, folder) -> None:
    torch.manual_seed(1)
    config = CONFIGS[name]()
    config.num_labels = 1
    model = REWARD[name].from_pretrained(folder / name, config=config, dtype=torch.float32)
    model.score.weight.data.normal_(0.0, 0.3)
    model.save_pretrained(folder / f"{name}_reward")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, reward models, and both as Megatron checkpoints."""
    folder = tmp_path_factory.mktemp("start")
    for name in LAYOUTS:
        save(name, folder / name)
        to_megatron(folder / name, folder / f"{name}_megatron")
    for name in REWARD:
        save_reward_model(name, folder)
        to_megatron(folder / f"{name}_reward", folder / f"{name}_reward_megatron")
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """Every model from its Hugging Face folder, in one process."""
    cases = {name: Case(name, steps=1) for name in LAYOUTS}
    for name, role in FRESH.items():
        cases[name] = Case("qwen2", head="value", steps=1, role=role)
    return dict(zip(cases, run_cases(list(cases.values()), 1, folder)))


@pytest.fixture(scope="module")
def together(folder):
    """All other starts, on four ranks."""
    cases = {
        (name, layout): Case(
            name, LAYOUTS[name][layout], steps=1, micro_batch=3,
            source=str(folder / f"{name}_megatron"),
        )
        for name, layout in PAIRS
    }  # fmt: skip
    cases |= {
        (name, form, layout): Case(
            name, REWARD_LAYOUTS[layout], "value", steps=1, source=str(folder / f"{name}_{form}")
        )
        for name, form, layout in REWARD_PAIRS
    }
    fresh = Case("qwen2", {TP: 2, PP: 2}, "value", steps=1, role=FRESH["fresh value head"])
    cases["fresh from a folder"] = fresh
    cases["fresh from a checkpoint"] = replace(fresh, source=str(folder / "qwen2_megatron"))
    return dict(zip(cases, run_cases(list(cases.values()), 4, folder)))


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_a_checkpoint_starts_a_role_like_its_folder(pair, alone, together):
    compare(together[pair], alone[pair[0]])


def expected_values(folder, name: str) -> torch.Tensor:
    """The scores of every prefix of a response by transformers' reward model: ``[T]``."""
    model = (
        REWARD[name]
        .from_pretrained(
            folder / f"{name}_reward", dtype=torch.float32, attn_implementation="eager"
        )
        .eval()
    )
    batch = batch_of()
    values_T = torch.zeros(len(batch.tokens_T))
    starts = batch.cu_seqlens.tolist()
    with torch.no_grad():
        for t in batch.response_mask_T.nonzero()[:, 0].tolist():
            start = max(s for s in starts if s <= t)
            values_T[t] = model(batch.tokens_T[None, start:t]).logits[0, 0]
    return values_T


@pytest.mark.parametrize("name", REWARD)
def test_a_critic_from_a_reward_model_gives_transformers_scores(name, folder, together):
    expected_T = expected_values(folder, name)
    assert expected_T.abs().max() > 0.3
    for form in ("reward", "reward_megatron"):
        for layout in REWARD_LAYOUTS:
            (values_T,) = together[name, form, layout].outputs
            torch.testing.assert_close(values_T, expected_T, atol=5e-6, rtol=1e-5)


def test_a_trained_critic_keeps_its_head_in_its_weights(folder, together):
    outcome = together["qwen2", "reward", "TP2xPP2"]
    assert not torch.equal(outcome.weights["score.weight"], outcome.initial["score.weight"])


def test_a_critic_from_a_plain_model_starts_with_a_new_head(alone, together):
    for form in ("folder", "checkpoint"):
        compare(together[f"fresh from a {form}"], alone["fresh value head"])
        heads = [
            outcome.initial["score.weight"]
            for outcome in (together[f"fresh from a {form}"], alone["fresh value head"])
        ]
        assert torch.equal(*heads)


def test_a_new_head_follows_from_its_distribution_and_seed(alone):
    drawn, other_seed, wider, zero = (alone[name].initial["score.weight"] for name in FRESH)
    assert 0.2 < drawn.std() < 0.4
    assert (drawn - other_seed).abs().max() > 0.1
    torch.testing.assert_close(wider, 2 * drawn)
    assert zero.count_nonzero() == 0

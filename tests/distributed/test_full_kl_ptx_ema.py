"""KL over the vocabulary, pretraining loss and moving average, in every layout."""

from __future__ import annotations

import dataclasses
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layout_case import VOCABULARY, Case, batch_of, build_role, everywhere, run_cases, train_step
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from vocabulary_kl import full_kl

from mppo.algos.token_axis import select_sequences
from mppo.batch.prompt import Prompt
from mppo.data.loader import PromptLoader
from mppo.data.source import PromptSet

TP, PP, CP = (
    f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context")
)  # fmt: skip
DECAY, COEF, STEPS, TEMPERATURE = 0.75, 0.5, 2, 0.9
POLICY = {"ema_decay": DECAY}
ALONE = Case("qwen2", role=POLICY, steps=STEPS)
VARIANTS = {
    "DP4, one sequence a micro-batch": ({}, {TP: 4}, 1),
    "TP2 x PP2": ({TP: 2, PP: 2}, {}, 4),
    "TP2 without sequence parallelism": ({TP: 2, "sequence_parallel": False}, {PP: 4}, 3),
    "CP2 x PP2": ({CP: 2, PP: 2}, {TP: 2}, 4),
    "PP2 x VPP2": ({PP: 2, "virtual_pipeline_model_parallel_size": 2}, {TP: 2, PP: 2}, 2),
}
"""The actor's layout, the reference's, and sequences per micro-batch."""

BIASED = {"moe_router_bias_update_rate": 0.01}
EXPERTS = {"": {}, "TP2 x EP2": {TP: 2, "expert_model_parallel_size": 2}}
"""Layouts, on one process and on four, of a model whose routers' biases move."""

KEPT = ("", "TP2 x PP2")
"""Runs (one process; a variant) whose average is exported and resumed."""


def documents() -> list[Prompt]:
    random = torch.Generator().manual_seed(5)
    lengths = [2, 9, 4, 13, 6]
    return [
        Prompt(i, tuple(torch.randint(0, VOCABULARY, (n,), generator=random).tolist()), "", "", "")
        for i, n in enumerate(lengths)
    ]


def kl_loss(batch):
    """A loss of log-probabilities and KL with a different weight for every response token."""
    weights_T = torch.cos(torch.arange(len(batch.tokens_T)).float()) * batch.response_mask_T

    def loss(outputs, indices):
        chosen = select_sequences(weights_T, batch.cu_seqlens, list(indices))
        kl = (chosen * outputs.full_kl_T).sum() / batch.num_sequences
        total = (chosen * outputs.logprobs_T).sum() / batch.num_sequences + kl
        return total, {"loss": total.detach(), "kl": kl.detach()}

    loss.statistics = ("loss", "kl")
    return loss


def train(case: Case, folder: Path, registry) -> dict[str, Any]:
    """Compute the full KL to a reference of another family and layout, then train with ptx text."""
    from mppo.batch.head_outputs import tensors_of
    from mppo.batch.mini_batch import MiniBatch, PassInputs
    from mppo.batch.shares import share_out
    from mppo.models.role import Role
    from mppo.models.streamed_role import forward, forward_with_states
    from mppo.recipe.sections.megatron import MegatronConfig
    from mppo.trainer.pretraining_mix import PretrainingMix

    world = dist.get_world_size()
    name = case.role.get("name", "")
    _, ref_layout, _ = VARIANTS.get(name, ({}, {}, 4))
    plain = dataclasses.replace(case, role=POLICY)
    actor = build_role(plain, folder, registry)
    settings = dataclasses.replace(
        actor.settings,
        name="ref",
        megatron=MegatronConfig(**ref_layout),
        optim=None,
        ema_decay=None,
    )
    groups, source = registry.of(settings.megatron.layout(world)), folder / "gemma2"
    reference = Role(settings, source, AutoConfig.from_pretrained(source), groups)
    actor.head.load_reference(reference.head, reference.weights, 1 << 14)
    batch = batch_of()
    home, lengths = share_out(batch), batch.lengths_B.tolist()
    ref_plan, plan = (role.plan(batch, training=False) for role in (reference, actor))
    share, _ = reference.fetch(home, ref_plan)
    ref_outputs, hidden_T = forward_with_states(reference, share, ref_plan)
    share, inputs = actor.fetch(home, plan, PassInputs(hidden_T))
    outputs = forward(actor, share, plan, inputs)
    plan, shape = actor.plan(batch, training=True), actor.micro_batch_spec(training=True)
    text = PretrainingMix(PromptLoader(PromptSet(tuple(documents())), 5, False, 0), COEF)
    share, inputs = actor.fetch(home, plan, PassInputs(hidden_T, text_from=len(lengths)))
    stats, norms, weights = [], [], [_weights(actor)]
    actor.optimizer.advance()
    for _ in range(case.steps):
        longer, longer_plan, objective = text.join(share, plan, text.draw(shape), kl_loss(batch))
        mini_batch = MiniBatch(longer, longer_plan, objective, inputs)
        statistics, result = train_step(actor, mini_batch)
        stats.append(statistics)
        norms.append(result.grad_norm)
        weights.append(_weights(actor))
    outcome = {
        "outputs": tuple(
            everywhere(x_T, home) for x_T in (*tensors_of(outputs), ref_outputs.logprobs_T)
        ),
        "stats": stats,
        "norms": norms,
        "weights": weights,
        "average": _average(actor),
    }
    if name in KEPT:
        outcome |= _keep_and_resume(actor, folder / f"{world}-{name}".replace(" ", "_"), registry)
        outcome["overflow"] = step_with_one_overflow(plain, folder, registry)
    return outcome


def _keep_and_resume(actor, folder: Path, registry) -> dict[str, Any]:
    """The average as it is exported, and as another layout takes it up from a checkpoint."""
    from megatron.core import dist_checkpointing

    from mppo.checkpoint.role_state import load_role, role_counters, sharded_state

    exported, checkpoint = folder.with_suffix(".average"), folder.with_suffix(".checkpoint")
    actor.weights.save_average(exported)
    if dist.get_rank() == 0:
        checkpoint.mkdir()
    dist.barrier()
    with actor.groups.active():
        dist_checkpointing.save(sharded_state(actor), str(checkpoint))
    counters = role_counters(actor)
    layout = {PP: min(dist.get_world_size(), 2)}
    other = build_role(Case("qwen2", layout, role=POLICY), folder.parent, registry)
    load_role(other, checkpoint, counters)
    return {
        "resumed": _average(other),
        "exported": load_file(exported / "model.safetensors"),
    }


def step_with_one_overflow(case: Case, folder: Path, registry) -> dict[str, Any]:
    """Train actor and critic, of three steps the first with an infinite gradient of the critic, the
    second with an infinite loss, whose gradient is finite, of one of its sequences."""
    from layout_case import objective

    from mppo.batch.mini_batch import MiniBatch
    from mppo.models.role import step_together
    from mppo.models.streamed_role import forward_backward

    actor = build_role(case, folder, registry)
    critic = build_role(dataclasses.replace(case, head="value", role={}), folder, registry)
    batch, roles = batch_of(), (actor, critic)
    seen = [[_weights(role) for role in roles]]
    for factor, lost in ((torch.inf, 0.0), (1.0, torch.inf), (1.0, 0.0)):
        for role in roles:
            plan = role.plan(batch, training=True)
            role.optimizer.advance()
            scale, added = (factor, lost) if role is critic else (1.0, 0.0)

            def loss(outputs, indices, scale=scale, added=added):
                total, stats = objective(batch)(outputs, indices)
                return scale * total + (added if 0 in indices else 0.0), stats

            loss.statistics = objective(batch).statistics
            forward_backward(role, MiniBatch(batch, plan, loss))
        results = step_together(roles)
        assert {result.applied for result in results.values()} == {factor == 1.0 and lost == 0.0}
        assert isfinite(results["critic"].grad_norm) == (factor == 1.0)
        assert isfinite(results["critic"].loss) == (factor == 1.0 and lost == 0.0)
        seen.append([_weights(role) for role in roles])
    plans = [[bucket.layout for bucket in actor.weights.stream(1 << 16)] for _ in range(2)]
    assert all(first is second for first, second in zip(*plans, strict=True)), "planned again"
    return {"weights": seen, "average": _average(actor)}


def _weights(role) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone() for bucket in role.weights.stream(1 << 16) for name, tensor in bucket
    }


def _average(role) -> dict[str, torch.Tensor]:
    with role.weights.average.in_place():
        return _weights(role)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    from tiny_models import save

    folder = tmp_path_factory.mktemp("extras")
    save("gemma2", folder / "gemma2")
    (alone,) = run_cases([ALONE], 1, folder, train)
    cases = [
        Case("qwen2", layout, micro_batch=size, steps=STEPS, role={"name": name})
        for name, (layout, _, size) in VARIANTS.items()
    ]
    return alone, dict(zip(VARIANTS, run_cases(cases, 4, folder, train))), folder


@pytest.fixture(scope="module")
def overflows(outcomes):
    """The state after an overflow, by model and layout."""
    alone, variants, folder = outcomes
    found = {"dense": alone["overflow"], f"dense {KEPT[1]}": variants[KEPT[1]]["overflow"]}
    for name, layout in EXPERTS.items():
        case = Case("moonlight", BIASED | layout, role=POLICY)
        world, there = (4, folder / "experts4") if layout else (1, folder / "experts1")
        there.mkdir()
        (found[f"experts {name}".strip()],) = run_cases(
            [case], world, there, step_with_one_overflow
        )
    return found


@torch.no_grad()
def _logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Transformers' log-probabilities for every token but the first: ``[tokens - 1, V]``."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model(torch.tensor([token_ids])).logits[0, :-1]


def test_full_kl_equals_that_of_complete_logits(outcomes):
    alone, _, folder = outcomes
    batch = batch_of()
    for i in (0, 4):
        first, last = batch.cu_seqlens[i : i + 2].tolist()
        ids = batch.tokens_T[first:last].tolist()
        policy, reference = (
            _logits(folder / name, ids) / TEMPERATURE for name in ("qwen2", "gemma2")
        )
        want = full_kl(policy, reference) * batch.response_mask_T[first + 1 : last]
        got = alone["outputs"][2][first + 1 : last]
        assert want.max() > 0.01
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_text_is_read_at_temperature_one(outcomes):
    alone, _, folder = outcomes
    losses = []
    for document in documents():
        logprobs = _logits(folder / "qwen2", document.token_ids.tolist()).log_softmax(-1)
        losses.append(-logprobs.gather(1, document.token_ids[1:, None].long())[:, 0])
    want = torch.cat(losses).mean().item()
    assert alone["stats"][0]["actor/ptx_loss"] == pytest.approx(want, rel=1e-5)
    assert alone["stats"][1]["actor/ptx_loss"] < want


def test_the_average_follows_every_step(outcomes):
    alone, _, _ = outcomes
    for name, start in alone["weights"][0].items():
        want = start
        for after in alone["weights"][1:]:
            want = DECAY * want + (1 - DECAY) * after[name]
        torch.testing.assert_close(alone["average"][name], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_every_layout_gives_the_numbers_of_one_process(outcomes, name):
    alone, variants, _ = outcomes
    got = variants[name]
    for output, want in zip(got["outputs"], alone["outputs"], strict=True):
        torch.testing.assert_close(output, want, rtol=1e-4, atol=1e-5)
    for stats, want in zip(got["stats"], alone["stats"], strict=True):
        assert stats == pytest.approx(want, rel=1e-4, abs=1e-5)
    assert got["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    for weight_name, weight in alone["weights"][-1].items():
        torch.testing.assert_close(got["weights"][-1][weight_name], weight, rtol=1e-4, atol=1e-5)
        average = alone["average"][weight_name]
        torch.testing.assert_close(got["average"][weight_name], average, rtol=1e-4, atol=1e-5)


def test_the_average_is_resumed_in_another_layout(outcomes):
    alone, variants, _ = outcomes
    for outcome in (alone, variants[KEPT[1]]):
        for name, average in outcome["average"].items():
            assert torch.equal(outcome["resumed"][name], average), name


def test_the_average_is_exported_completely(outcomes):
    alone, variants, _ = outcomes
    for outcome in (alone, variants[KEPT[1]]):
        for name, average in outcome["average"].items():
            assert torch.equal(outcome["exported"][name], average), name


def test_a_nonfinite_gradient_or_loss_of_the_critic_skips_the_actors_step_too(overflows):
    for outcome in overflows.values():
        before, *skipped, after = outcome["weights"]
        for role, (start, stepped) in enumerate(zip(before, after)):
            for name, weight in start.items():
                assert torch.equal(skipped[0][role][name], weight), name
                assert torch.equal(skipped[1][role][name], weight), f"{name}: an infinite loss"
            assert any(not torch.equal(stepped[name], weight) for name, weight in start.items())


def test_the_average_ignores_a_skipped_step(overflows):
    for model in ("dense", f"dense {KEPT[1]}"):
        (start, _), *_, (stepped, _) = overflows[model]["weights"]
        for name, average in overflows[model]["average"].items():
            want = DECAY * start[name] + (1 - DECAY) * stepped[name]
            torch.testing.assert_close(average, want, rtol=1e-5, atol=1e-6)


def test_expert_biases_change_only_with_an_applied_step(overflows):
    alone, together = overflows["experts"], overflows["experts TP2 x EP2"]
    for role in (0, 1):
        start, stepped = alone["weights"][0][role], alone["weights"][-1][role]
        biases = [name for name in start if name.endswith("e_score_correction_bias")]
        assert len(biases) == 3
        for name in biases:
            moved = (stepped[name] - start[name]) / BIASED["moe_router_bias_update_rate"]
            assert moved.abs().max() > 0.5, name
            torch.testing.assert_close(moved, moved.round(), atol=1e-4, rtol=0)
            assert torch.equal(together["weights"][-1][role][name], stepped[name]), name

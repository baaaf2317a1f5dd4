"""Experts in one step over sorted tokens equal one expert after the other."""

from __future__ import annotations

import pytest
import torch
from hf_families import CONFIGS
from torch.nn.functional import silu

from mppo.models.configuration import transformer_config
from mppo.models.families.architectures import family_config
from mppo.models.moe.experts import _GatedExperts, is_plain
from mppo.recipe.sections.megatron import MegatronConfig

COUNTS = [3, 0, 5, 1]
HIDDEN, WIDTH = 6, 4


def inputs(dtype=torch.float64):
    random = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=dtype, generator=random, requires_grad=True)

    count = len(COUNTS)
    first = [draw(2 * WIDTH, HIDDEN) for _ in range(count)]
    second = [draw(HIDDEN, WIDTH) for _ in range(count)]
    return draw(sum(COUNTS), HIDDEN), draw(sum(COUNTS)), first, second


def one_after_the_other(tokens, probs, first, second):
    out = []
    for x, p, w1, w2 in zip(tokens.split(COUNTS), probs.split(COUNTS), first, second):
        gate, up = (x @ w1.t()).chunk(2, dim=1)
        out.append((silu(gate) * up * p[:, None]) @ w2.t())
    return torch.cat(out)


def test_outputs_and_gradients_are_those_of_single_experts():
    tokens, probs, first, second = inputs()
    leaves = [tokens, probs, *first, *second]
    ours = _GatedExperts.apply(tokens, probs, COUNTS, *first, *second)
    theirs = one_after_the_other(tokens, probs, first, second)
    torch.testing.assert_close(ours, theirs)
    weight = torch.sin(torch.arange(ours.numel(), dtype=ours.dtype)).view_as(ours)
    for mine, other in zip(
        torch.autograd.grad((ours * weight).sum(), leaves),
        torch.autograd.grad((theirs * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


def test_an_expert_without_tokens_has_a_gradient_of_zero():
    tokens, probs, first, second = inputs()
    _GatedExperts.apply(tokens, probs, COUNTS, *first, *second).sum().backward()
    assert torch.equal(first[1].grad, torch.zeros_like(first[1]))
    assert torch.equal(second[1].grad, torch.zeros_like(second[1]))


@pytest.mark.parametrize("frozen", ["first", "second"])
def test_frozen_weights_get_no_gradient(frozen):
    tokens, probs, first, second = inputs()
    for weight in first if frozen == "first" else second:
        weight.requires_grad_(False)
    _GatedExperts.apply(tokens, probs, COUNTS, *first, *second).sum().backward()
    assert all((w.grad is None) == (frozen == "first") for w in first)
    assert all((w.grad is None) == (frozen == "second") for w in second)


def test_the_dtype_of_the_tokens_is_kept():
    tokens, probs, first, second = inputs(torch.bfloat16)
    out = _GatedExperts.apply(tokens, probs.detach().float(), COUNTS, *first, *second)
    out.float().sum().backward()
    assert out.dtype == tokens.grad.dtype == first[0].grad.dtype == torch.bfloat16


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "moonlight"])
def test_roles_of_mixtures_run_their_experts_in_one_step(name, trained):
    family = family_config(CONFIGS[name]())
    layout = MegatronConfig().layout(1)
    config = transformer_config(family, MegatronConfig(), layout, torch.float32, trained=trained)
    assert is_plain(config)

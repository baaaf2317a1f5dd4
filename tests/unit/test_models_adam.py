"""The AdamW that Megatron builds where neither Transformer Engine nor Apex is installed."""

import pytest
import torch

from mppo.models.adam import AdamW

SHAPES = [(7,), (5, 3), (128, 64), (1,), (2, 3, 4)]


def _parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES
    ]


def _train(optimizer, params, steps=20):
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_updates_parameters_exactly_as_torch_does(weight_decay):
    ours, theirs = _parameters(), _parameters()
    keywords = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
    _train(AdamW(ours, **keywords), ours)
    _train(torch.optim.AdamW(theirs, fused=True, **keywords), theirs)
    for mine, other in zip(ours, theirs):
        assert torch.equal(mine, other)


def test_the_fused_kernel_agrees_with_the_plain_formula():
    ours, theirs = _parameters(), _parameters()
    _train(AdamW(ours, weight_decay=0.1), ours)
    _train(torch.optim.AdamW(theirs, foreach=False, weight_decay=0.1), theirs)
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_the_step_is_in_the_group_and_the_state_holds_two_tensors():
    params = _parameters()
    optimizer = AdamW(params, lr=1e-3)
    _train(optimizer, params, steps=3)
    assert [group["step"] for group in optimizer.param_groups] == [3]
    assert {frozenset(state) for state in optimizer.state.values()} == {
        frozenset({"exp_avg", "exp_avg_sq"})
    }


def test_a_restored_state_continues_bitwise():
    complete, first = _parameters(), _parameters()
    _train(AdamW(complete, lr=1e-3), complete, steps=20)
    optimizer = AdamW(first, lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        if step == 9:
            restored = AdamW(first, lr=1e-3)
            restored.load_state_dict(optimizer.state_dict())
            optimizer = restored
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1)
        for p in first:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    for mine, other in zip(first, complete):
        assert torch.equal(mine, other)


def test_parameters_without_a_gradient_do_not_change():
    params = _parameters()
    before = params[0].detach().clone()
    optimizer = AdamW(params, lr=1.0)
    for p in params[1:]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(params[0], before)


def test_coupled_weight_decay_is_refused():
    with pytest.raises(ValueError, match="adam_w_mode"):
        AdamW(_parameters(), adam_w_mode=False)

"""KL estimates, the KL over the vocabulary, and the controller."""

import math

import pytest
import torch
from vocabulary_kl import full_kl

from mppo.algos.kl import KLController, full_kl_shard, full_kl_shard_grad, kl_estimate

D = math.log(2.0)  # policy twice as likely as the reference


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("kl", D),
        ("k1", D),
        ("abs", D),
        ("mse", D * D / 2),
        ("k2", D * D / 2),
        ("low_var_kl", 0.5 + D - 1),
        ("k3", 0.5 + D - 1),
    ],
)
def test_estimates_by_hand(kind, expected):
    logprobs, ref = torch.tensor([-1.0]), torch.tensor([-1.0 - D])
    for name in (kind, kind + "+"):
        torch.testing.assert_close(kl_estimate(logprobs, ref, name), torch.tensor([expected]))


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "full"])
def test_the_plus_form_has_the_gradient_of_k2(kind):
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    ref, full_kl_T = torch.tensor([-1.5, -0.5]), torch.tensor([0.3, 0.7])
    value = kl_estimate(logprobs, ref, kind + "+", full_kl_T)
    torch.testing.assert_close(value, kl_estimate(logprobs, ref, kind, full_kl_T))
    value.sum().backward()
    torch.testing.assert_close(logprobs.grad, (logprobs - ref).detach())


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_gradients_equal_finite_differences(kind):
    logprobs = torch.tensor([-1.0, -2.0, -0.3], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.5, -0.5, -2.9], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref, kind), logprobs)


def test_estimates_are_zero_where_the_policies_agree():
    logprobs = torch.tensor([-0.5, -3.0])
    for kind in ("k1", "abs", "k2", "k3"):
        assert kl_estimate(logprobs, logprobs, kind).tolist() == [0.0, 0.0]


def test_huge_log_ratios_stay_finite():
    logprobs = torch.tensor([0.0, -1e4], requires_grad=True)
    kl = kl_estimate(logprobs, torch.tensor([-1e4, 0.0]), "k3")
    # d = 20 (clamped): exp(-20) + 20 - 1, held at 10; d = -20: e^20 and so 10
    assert kl.tolist() == [10.0, 10.0]
    kl.sum().backward()
    assert torch.isfinite(logprobs.grad).all()


def test_full_kl_by_hand_and_against_torch():
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]])
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    torch.testing.assert_close(full_kl(p.log() + 3, q.log() - 1), torch.tensor([expected]))
    logits, ref = torch.randn(5, 11), torch.randn(5, 11)
    expected = torch.nn.functional.kl_div(
        ref.log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(full_kl(logits, ref), expected)


def test_full_kl_of_vocabulary_shards_adds_up_with_its_gradient():
    logits = torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(4, 12, dtype=torch.float64)
    log_z, ref_log_z = logits.detach().logsumexp(-1), ref.logsumexp(-1)
    shards = list(zip(logits.detach().split(5, -1), ref.split(5, -1)))
    parts = [full_kl_shard(shard, ref_shard, log_z, ref_log_z) for shard, ref_shard in shards]
    complete = full_kl(logits, ref)
    torch.testing.assert_close(sum(parts), complete.detach())
    grads = [full_kl_shard_grad(*shard, log_z, ref_log_z, complete.detach()) for shard in shards]
    (expected,) = torch.autograd.grad(complete.sum(), logits)
    torch.testing.assert_close(torch.cat(grads, -1), expected)
    assert torch.autograd.gradcheck(lambda x: full_kl(x, ref), logits)


def test_full_kl_with_a_forbidden_token_is_finite():
    logits = torch.tensor([[0.0, -math.inf, 0.0]])
    assert torch.isfinite(full_kl(logits, torch.zeros(1, 3))).all()


def test_sampled_estimates_are_unbiased_for_the_full_kl():
    generator = torch.Generator().manual_seed(0)
    logits, ref = torch.randn(1, 6, generator=generator), torch.randn(1, 6, generator=generator)
    p, logp, logq = logits.softmax(-1)[0], logits.log_softmax(-1)[0], ref.log_softmax(-1)[0]
    for kind in ("k1", "k3"):
        expected_value = (p * kl_estimate(logp, logq, kind)).sum()
        torch.testing.assert_close(expected_value, full_kl(logits, ref)[0])


def test_wrong_names_list_the_valid_ones():
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="low_var_kl"):
        kl_estimate(one, one, "k4")
    with pytest.raises(ValueError, match="full_kl_T"):
        kl_estimate(one, one, "full+")
    torch.testing.assert_close(kl_estimate(one, one, "full", torch.tensor([0.3]))[0].item(), 0.3)


def test_the_adaptive_controller_moves_by_verls_formula():
    controller = KLController("adaptive", kl_coef=0.1, target_kl=0.1, horizon=1000)
    controller.update(current_kl=0.11, num_sequences=100)  # error 0.1
    assert controller.coef == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    controller.coef = 0.1
    controller.update(current_kl=5.0, num_sequences=100)  # error clipped to 0.2
    assert controller.coef == pytest.approx(0.1 * 1.02)
    controller.coef = 0.1
    controller.update(current_kl=0.0, num_sequences=100)  # and to -0.2
    assert controller.coef == pytest.approx(0.1 * 0.98)


def test_a_fixed_controller_is_constant_and_a_resumed_one_continues():
    fixed = KLController("fixed", 0.05, 0.1, 1000)
    fixed.update(9.0, 1000)
    assert fixed.coef == 0.05
    first, second = (KLController("adaptive", 0.1, 0.1, 500) for _ in range(2))
    first.update(0.2, 64)
    second.load_state_dict(first.state_dict())
    first.update(0.05, 64)
    second.update(0.05, 64)
    assert first.coef == second.coef

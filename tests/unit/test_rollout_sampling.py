"""The sampler: reproducible, of the right distribution, log-probabilities before truncation."""

import pytest
import torch

from mppo.recipe.sections.rollout import SamplingConfig
from mppo.rollout.local.sampling import draw, row_keys, uniforms


def test_uniforms_do_not_depend_on_batching() -> None:
    uid, sample = torch.arange(6), torch.tensor([0, 1, 0, 1, 2, 3])
    together = uniforms(row_keys(7, uid, sample), 0, 40)
    alone = uniforms(row_keys(7, uid[4:5], sample[4:5]), 17, 10)
    assert torch.equal(together[4:5, 17:27], alone)


def test_uniforms_are_uniform_and_independent_over_rows_tokens_and_seeds() -> None:
    uid = torch.arange(2000)
    draws = uniforms(row_keys(0, uid, torch.zeros_like(uid)), 0, 50)
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = torch.histc(draws.flatten(), bins=20, min=0, max=1)
    expected = draws.numel() / 20
    assert ((counts - expected) ** 2 / expected).sum() < 43.8  # chi-square, 19 degrees, 0.1%
    centred = draws - 0.5
    assert (centred[:, 1:] * centred[:, :-1]).mean().abs() < 0.001
    assert (centred[1:] * centred[:-1]).mean().abs() < 0.001
    other = uniforms(row_keys(1, uid, torch.zeros_like(uid)), 0, 50) - 0.5
    assert (centred * other).mean().abs() < 0.001


def test_any_python_seed_is_accepted() -> None:
    uid = torch.arange(2)
    keys = {int(row_keys(seed, uid, uid)[0]) for seed in (0, -1, 2**31, 2**63, 2**80 + 1)}
    assert len(keys) == 5


def test_frequencies_follow_the_tempered_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    rows = 40000
    uniform = uniforms(row_keys(3, torch.arange(rows), torch.zeros(rows).long()), 0, 1)[:, 0]
    token, logprob = draw(logits.expand(rows, 5), uniform, SamplingConfig(temperature=0.7))
    expected = (logits / 0.7).softmax(-1)
    torch.testing.assert_close(
        torch.bincount(token, minlength=5) / rows, expected, atol=0.01, rtol=0
    )
    torch.testing.assert_close(logprob, (logits / 0.7).log_softmax(-1)[token])


@pytest.mark.parametrize(
    ("options", "support"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"min_p": 0.2}, {0, 1}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),
        ({"top_k": 2, "top_p": 0.7}, {0, 1}),  # 0.73 of the two alone
        ({"top_k": 100, "min_p": 0.03}, {0, 1, 2, 3}),
    ],
)
def test_truncation_keeps_the_right_tokens(options: dict, support: set[int]) -> None:
    # probabilities 0.6439 0.2369 0.0871 0.0321
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0]).expand(4000, 4)
    uniform = uniforms(row_keys(0, torch.arange(4000), torch.zeros(4000).long()), 0, 1)[:, 0]
    token, logprob = draw(logits, uniform, SamplingConfig(**options))
    assert set(token.tolist()) == support
    torch.testing.assert_close(logprob, logits[0].log_softmax(-1)[token])
    kept = logits[0].softmax(-1) * torch.tensor([float(i in support) for i in range(4)])
    torch.testing.assert_close(
        torch.bincount(token, minlength=4) / 4000, kept / kept.sum(), atol=0.03, rtol=0
    )


def test_truncation_agrees_with_transformers_warpers() -> None:
    from transformers import (
        MinPLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    torch.manual_seed(0)
    logits = torch.randn(1, 50) * 3
    kept = [warper(None, logits) for warper in (TopKLogitsWarper(20), TopPLogitsWarper(0.9))]
    warped = MinPLogitsWarper(0.02)(None, torch.minimum(*kept))
    sampling = SamplingConfig(top_k=20, top_p=0.9, min_p=0.02)
    uniform = torch.linspace(0, 1 - 1e-9, 20000, dtype=torch.float64)
    token, _ = draw(logits.expand(20000, 50), uniform, sampling)
    frequency = torch.bincount(token, minlength=50) / 20000
    torch.testing.assert_close(frequency, warped.softmax(-1)[0], atol=2e-4, rtol=0)


def test_greedy_takes_the_most_likely_and_says_its_logprob_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]], dtype=torch.bfloat16)
    token, logprob = draw(logits, torch.zeros(1).double(), SamplingConfig(temperature=0.0))
    assert token.tolist() == [1]
    torch.testing.assert_close(logprob, logits.float().log_softmax(-1)[:, 1])


def test_a_token_without_probability_is_never_drawn_at_the_ends() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]]).expand(2, 3)
    token, _ = draw(logits, torch.tensor([0, 1 - 2.0**-40], dtype=torch.float64), SamplingConfig())
    assert token.tolist() == [1, 1]

"""The chunked head equals plain log_softmax, values and gradients."""

from __future__ import annotations

import pytest
import torch
from transformers import PretrainedConfig, Qwen2Config
from vocabulary_kl import full_kl

from mppo.models.heads.value_head import initial_std
from mppo.models.heads.vocabulary import (
    Projection,
    VocabShard,
    chunked_full_kl,
    chunked_logprobs,
    chunked_squares,
    vocabulary_logits,
)
from mppo.recipe.sections.roles import CriticConfig

N, HIDDEN, VOCAB, PADDED = 11, 6, 13, 16


def case(temperature=1.0, softcap=None, chunk=4, start=0):
    return VocabShard(start, VOCAB, None, temperature, softcap, chunk)


def tensors():
    torch.manual_seed(0)
    hidden = torch.randn(N, HIDDEN, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(PADDED, HIDDEN, requires_grad=True)
    return hidden, weight, torch.randint(0, VOCAB, (N,))


def plain(hidden, weight, target, vocabulary):
    logits = hidden @ weight[:VOCAB].t()
    if vocabulary.softcap is not None:
        logits = vocabulary.softcap * torch.tanh(logits / vocabulary.softcap)
    logp = (logits / vocabulary.temperature).log_softmax(-1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, None), (1.3, 2.5)])
def test_values_and_gradients(temperature, softcap, chunk):
    vocabulary = case(temperature, softcap, chunk)
    results = []
    for function in (chunked_logprobs, plain):
        hidden, weight, target = tensors()
        logprobs, entropy = function(hidden, weight, target, vocabulary)
        (logprobs.sin().sum() + (entropy * torch.arange(N)).sum()).backward()
        results.append((logprobs, entropy, hidden.grad, weight.grad))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_squares_of_the_probabilities(chunk):
    hidden, weight, _ = tensors()
    found = chunked_squares(hidden, weight, case(0.7, 2.5, chunk))
    logits = 2.5 * torch.tanh(hidden @ weight[:VOCAB].t() / 2.5) / 0.7
    torch.testing.assert_close(found, logits.softmax(-1).square().sum(-1), rtol=1e-5, atol=1e-6)
    assert not found.requires_grad
    assert len(chunked_squares(hidden[:0], weight, case())) == 0


def test_gradient_of_the_logprobs_alone():
    results = []
    for function in (chunked_logprobs, plain):
        hidden, weight, target = tensors()
        function(hidden, weight, target, case())[0].sum().backward()
        results.append((hidden.grad, weight.grad))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_padded_rows_get_no_gradient():
    hidden, weight, target = tensors()
    chunked_logprobs(hidden, weight, target, case())[1].sum().backward()
    assert torch.equal(weight.grad[VOCAB:], torch.zeros(PADDED - VOCAB, HIDDEN))


def test_no_position_is_still_part_of_the_graph():
    hidden, weight, target = tensors()
    logprobs, _ = chunked_logprobs(hidden[:0], weight, target[:0], case())
    logprobs.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_extreme_logits_stay_finite():
    hidden = torch.full((2, HIDDEN), 1e4, requires_grad=True)
    weight = torch.randn(PADDED, HIDDEN, generator=torch.Generator().manual_seed(1))
    logprobs, entropy = chunked_logprobs(hidden, weight, torch.tensor([0, 5]), case())
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.isfinite(torch.cat([logprobs, entropy, hidden.grad.flatten()])).all()


@pytest.mark.parametrize("chunk", [4, 100])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (1.3, 2.5)])
def test_kl_over_the_vocabulary_and_its_gradients(temperature, softcap, chunk):
    vocabulary = case(temperature, softcap, chunk)
    ref_hidden, ref_weight = torch.randn(N, 3), torch.randn(PADDED, 3)
    reference = Projection(ref_weight, case(temperature, None, chunk))

    def complete(hidden, weight):
        logits, _ = vocabulary_logits(hidden, weight, vocabulary)
        ref_logits, _ = vocabulary_logits(ref_hidden, ref_weight, reference.shard)
        return full_kl(logits[:, :VOCAB], ref_logits[:, :VOCAB])

    def chunked(hidden, weight):
        return chunked_full_kl(hidden, weight, ref_hidden, vocabulary, reference)

    results = []
    for function in (chunked, complete):
        hidden, weight, _ = tensors()
        kl = function(hidden, weight)
        (kl * torch.arange(N)).sum().backward()
        results.append((kl, hidden.grad, weight.grad))
    assert (results[0][0] > 0).all()
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


def test_full_kl_of_no_position_is_still_part_of_the_graph():
    hidden, weight, _ = tensors()
    reference = Projection(weight.detach(), case())
    chunked_full_kl(hidden[:0], weight, hidden.detach()[:0], case(), reference).sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize(
    ("init", "std"),
    [("initializer_range", 0.05), ("inverse_hidden", 1 / 64), (0.0, 0.0), (3, 3.0)],
)
def test_the_standard_deviation_of_a_new_value_head(init, std):
    critic = CriticConfig(value_head_init=init)
    config = Qwen2Config(hidden_size=63, initializer_range=0.05)
    assert initial_std(critic.value_head_init, config) == std


def test_a_model_without_an_initializer_range_has_that_of_transformers():
    assert initial_std("initializer_range", PretrainedConfig()) == Qwen2Config().initializer_range

"""Draw tokens from logits, with the same result for any batching.

The randomness of token ``t`` of sample ``s`` of prompt ``uid`` is a counter-based hash of
``(seed, uid, s, t)``: one uniform number, inverted through the cumulative distribution. It does not
depend on the number of ranks or on the rows that share a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mppo.recipe.sections.rollout import SamplingConfig

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_UNIFORM_BITS = 40


def _mix(state: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 (wrapping) arithmetic (Steele et al., OOPSLA 2014)."""
    state = (state ^ ((state >> 30) & ((1 << 34) - 1))) * _MIX_1
    state = (state ^ ((state >> 27) & ((1 << 37) - 1))) * _MIX_2
    return state ^ ((state >> 31) & ((1 << 33) - 1))


def row_keys(seed: int, uid_R: Tensor, sample_R: Tensor) -> Tensor:
    """The key of each row's random stream, int64 ``[R]``, from any integer seed and the int64
    ``[R]`` uids of prompts and sample numbers."""
    wrapped = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    state = _mix(torch.full_like(uid_R, wrapped) + _GOLDEN)
    state = _mix((state ^ uid_R) + _GOLDEN)
    return _mix((state ^ sample_R) + _GOLDEN)


def uniforms(key_R: Tensor, start: int, count: int) -> Tensor:
    """Uniform numbers in ``[0, 1)`` for tokens ``start .. start + count`` of each row: float64
    ``[R, count]`` with a resolution of 40 bits, so that rounding never gives 1."""
    counter = torch.arange(start + 1, start + count + 1, device=key_R.device) * _GOLDEN
    bits = _mix(key_R[:, None] + counter)
    return ((bits >> 24) & ((1 << _UNIFORM_BITS) - 1)).double() * 2.0**-_UNIFORM_BITS


def _invert(weight_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Draw an index in proportion to non-negative weights: int64 ``[R]``.

    A row with a NaN weight gives the last index; its log-probability is NaN, which callers check.
    """
    cumulative_RV = weight_RV.cumsum(-1, dtype=torch.float64)
    target_R1 = uniform_R[:, None] * cumulative_RV[:, -1:]
    index_R1 = torch.searchsorted(cumulative_RV, target_R1, right=True)
    return index_R1.clamp_(max=weight_RV.shape[-1] - 1)[:, 0]


def _draw_truncated(logprobs_RV: Tensor, uniform_R: Tensor, sampling: SamplingConfig) -> Tensor:
    """Draw a token of each row, int64 ``[R]``, within top-k, top-p and min-p.

    All three refer to the probabilities before any truncation, as in SGLang's sampler: top-p does
    not count the tokens outside top-k as 0.
    """
    if sampling.top_k < 1 and sampling.top_p == 1.0:
        weight_RV = logprobs_RV.exp()
        floor_R1 = sampling.min_p * weight_RV.amax(-1, keepdim=True)
        return _invert(weight_RV.masked_fill_(weight_RV < floor_R1, 0.0), uniform_R)
    vocab = logprobs_RV.shape[-1]
    keep = min(sampling.top_k, vocab) if sampling.top_k > 0 else vocab
    sorted_RK, token_RK = logprobs_RV.topk(keep, dim=-1)
    weight_RK = sorted_RK.exp()
    above_RK = weight_RK.cumsum(-1) - weight_RK
    dropped_RK = (above_RK >= sampling.top_p) | (weight_RK < sampling.min_p * weight_RK[:, :1])
    dropped_RK[:, 0] = False
    index_R = _invert(weight_RK.masked_fill_(dropped_RK, 0.0), uniform_R)
    return token_RK.gather(-1, index_R[:, None])[:, 0]


def draw(logits_RV: Tensor, uniform_R: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Sample one token per row.

    Args:
        logits_RV: ``[R, V]``, any float type.
        uniform_R: float64 ``[R]`` in ``[0, 1)``; unused when greedy.
        sampling: temperature (0: the most likely token), top-k, top-p, min-p.

    Returns:
        Tokens int64 ``[R]`` and their log-probabilities float32 ``[R]`` under
        softmax(logits / temperature), before any truncation (at temperature 1 when greedy).
    """
    logits_RV = logits_RV.float()
    if sampling.temperature not in (0.0, 1.0):
        logits_RV = logits_RV / sampling.temperature
    logprobs_RV = logits_RV.log_softmax(-1)
    if sampling.temperature == 0.0:
        token_R = logprobs_RV.argmax(-1)
    elif sampling.top_k < 1 and sampling.top_p == 1.0 and sampling.min_p == 0.0:
        token_R = _invert(logprobs_RV.exp(), uniform_R)
    else:
        token_R = _draw_truncated(logprobs_RV, uniform_R, sampling)
    return token_R, logprobs_RV.gather(-1, token_R[:, None])[:, 0]

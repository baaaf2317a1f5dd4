"""KL divergence between policy and reference: one-sample estimates, and the exact sum.

With ``d = log pi - log pi_ref`` of the sampled token (http://joschu.net/blog/kl-approx.html):

- ``k1`` / ``kl``: ``d``
- ``abs``: ``|d|``
- ``k2`` / ``mse``: ``d^2 / 2``
- ``k3`` / ``low_var_kl``: ``exp(-d) + d - 1``, ``d`` clamped to +-20 and the result to +-10 (verl)
- ``full``: ``sum_v pi_v (log pi_v - log pi_ref_v)``, over the vocabulary

A trailing ``+`` keeps the value and takes the gradient of k2, which is unbiased for the gradient
of the KL: ``k2 - sg(k2) + sg(value)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mppo.safety.input_error import InputError

LOG_RATIO_LIMIT = 20.0
LOW_VAR_KL_LIMIT = 10.0


def kl_estimate(
    logprobs_T: Tensor, ref_logprobs_T: Tensor, kind: str, full_kl_T: Tensor | None = None
) -> Tensor:
    """Per-token KL (nats) by name, with or without ``+`` (see the table above; verl
    ``kl_penalty``). ``full`` needs the KL over the whole vocabulary, ``full_kl_T``; without it, or
    for an unknown name, InputError."""
    name = kind.removesuffix("+")
    d_T = logprobs_T - ref_logprobs_T
    if name in ("kl", "k1"):
        value_T = d_T
    elif name == "abs":
        value_T = d_T.abs()
    elif name in ("mse", "k2"):
        value_T = 0.5 * d_T.square()
    elif name in ("low_var_kl", "k3"):
        clamped_T = d_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        value_T = (torch.expm1(-clamped_T) + clamped_T).clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT)
    elif name == "full":
        if full_kl_T is None:
            raise InputError(
                "kl type 'full' needs the KL over the vocabulary (full_kl_T), which cannot be "
                "computed from one token's log-probability: pass it, or use k1, k2, k3 or abs"
            )
        value_T = full_kl_T
    else:
        raise InputError(
            f"unknown kl type {kind!r}; use kl (k1), abs, mse (k2), low_var_kl (k3) or full, "
            "each with or without '+'"
        )
    if kind.endswith("+"):
        k2_T = 0.5 * d_T.square()
        return k2_T - k2_T.detach() + value_T.detach()
    return value_T


def full_kl(logits_TV: Tensor, ref_logits_TV: Tensor) -> Tensor:
    """KL(policy || reference) over the vocabulary, ``sum_v p_v (log p_v - log q_v)``, float ``[T]``
    (nats), not negative; -inf is allowed where the policy gives no probability."""
    log_z_T = torch.logsumexp(logits_TV, dim=-1)
    ref_log_z_T = torch.logsumexp(ref_logits_TV, dim=-1)
    return full_kl_shard(logits_TV, ref_logits_TV, log_z_T, ref_log_z_T).clamp(min=0.0)


def full_kl_shard(
    logits_TV: Tensor, ref_logits_TV: Tensor, log_z_T: Tensor, ref_log_z_T: Tensor
) -> Tensor:
    """One vocabulary shard's summand of :func:`full_kl`, from logits ``[T, V / tp]`` and the
    log-sum-exps over the whole vocabulary ``[T]``."""
    log_p_TV = logits_TV - log_z_T.unsqueeze(-1)
    log_q_TV = ref_logits_TV - ref_log_z_T.unsqueeze(-1)
    p_TV = log_p_TV.exp()
    return torch.where(p_TV > 0, p_TV * (log_p_TV - log_q_TV), 0.0).sum(-1)


def full_kl_shard_grad(
    logits_TV: Tensor, ref_logits_TV: Tensor, log_z_T: Tensor, ref_log_z_T: Tensor, kl_T: Tensor
) -> Tensor:
    """Gradient of :func:`full_kl` by this shard's policy logits, ``p (log p - log q - KL)``: float
    ``[T, V / tp]``; ``kl_T`` is summed over all shards."""
    log_p_TV = logits_TV - log_z_T.unsqueeze(-1)
    log_q_TV = ref_logits_TV - ref_log_z_T.unsqueeze(-1)
    p_TV = log_p_TV.exp()
    return torch.where(p_TV > 0, p_TV * (log_p_TV - log_q_TV - kl_T.unsqueeze(-1)), 0.0)

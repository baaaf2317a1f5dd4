"""KL divergence between policy and reference, and the coefficient of its penalty in the reward.

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
    """Per-token KL (nats) of a ``kind`` in the table above. ``full`` returns ``full_kl_T``, which
    the caller sums over the vocabulary. Source: verl ``kl_penalty``."""
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


def full_kl_shard(
    logits_TV: Tensor, ref_logits_TV: Tensor, log_z_T: Tensor, ref_log_z_T: Tensor
) -> Tensor:
    """``sum_v p_v (log p_v - log q_v)`` over one shard of the vocabulary, float ``[T]`` (nats).

    Each rank adds up its own columns of the logits ``[T, V / tp]``. ``log_z_T`` and ``ref_log_z_T``
    are log-sum-exps over the whole vocabulary ``[T]``. A logit of -inf is allowed.
    """
    log_p_TV = logits_TV - log_z_T.unsqueeze(-1)
    log_q_TV = ref_logits_TV - ref_log_z_T.unsqueeze(-1)
    p_TV = log_p_TV.exp()
    return torch.where(p_TV > 0, p_TV * (log_p_TV - log_q_TV), 0.0).sum(-1)


def full_kl_shard_grad(
    logits_TV: Tensor, ref_logits_TV: Tensor, log_z_T: Tensor, ref_log_z_T: Tensor, kl_T: Tensor
) -> Tensor:
    """The full KL's gradient with respect to a shard's policy logits: ``p (log p - log q - KL)``,
    float ``[T, V / tp]``; ``kl_T`` is the sum over all shards."""
    log_p_TV = logits_TV - log_z_T.unsqueeze(-1)
    log_q_TV = ref_logits_TV - ref_log_z_T.unsqueeze(-1)
    p_TV = log_p_TV.exp()
    return torch.where(p_TV > 0, p_TV * (log_p_TV - log_q_TV - kl_T.unsqueeze(-1)), 0.0)


class KLController:
    """Keeps the coefficient between steps, ``fixed`` or ``adaptive``:
    ``coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)``.

    KL and target in nats; ``n`` and the horizon (time constant of the adaptation) in sequences.
    Source: https://arxiv.org/abs/1909.08593; verl ``AdaptiveKLController``.
    """

    def __init__(self, kind: str, kl_coef: float, target_kl: float, horizon: int) -> None:
        self.kind = kind
        self.coef = kl_coef
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, num_sequences: int) -> None:
        if self.kind == "adaptive":
            error = min(max(current_kl / self.target_kl - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + error * num_sequences / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a saved coefficient; target and horizon remain the recipe's."""
        self.coef = float(state["coef"])

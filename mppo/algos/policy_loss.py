"""Policy losses per token. The caller aggregates.

``ratio = exp(clamp(log pi - log pi_old, -20, 20))``. Each loss function returns the loss,
float ``[T]``, and two indicators ``[T]``: where the clip range and where the dual clip took effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mppo import register
from mppo.algos.masked import expand_to_tokens, sequence_mean

LOG_RATIO_LIMIT = 20.0
SEQUENCE_LOG_RATIO_LIMIT = 10.0

Loss = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class LossInputs:
    """What a policy loss is computed from, for complete sequences of a micro-batch.

    Args:
        logprobs_T: of the current policy, with its gradient.
        old_logprobs_T: of the policy before the update.
        ratio_T, log_ratio_T: of :func:`importance_ratio`.
        low, high: clip range.
        selected_T: tokens selected by their covariance (clip_cov, kl_cov).
        dual_clip: bound of the ratio for negative advantages; None: none.
        tau_pos, tau_neg: temperatures of sapo.
        kl_coef: of kl_cov.
        dro_beta: of dro.
        importance_T: for reinforce: weight of each token; None: 1.
    """

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    ratio_T: Tensor
    log_ratio_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    cu_seqlens: Tensor
    selected_T: Tensor
    low: float = 0.2
    high: float = 0.2
    dual_clip: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    kl_coef: float = 0.1
    dro_beta: float | None = None
    importance_T: Tensor | None = None


PolicyLoss = Callable[[LossInputs], Loss]
"""Returns the loss of each token and two indicators, as :func:`with_indicators` makes them."""


def with_indicators(
    loss_T: Tensor, clipped_T: Tensor | None = None, dual_clipped_T: Tensor | None = None
) -> Loss:
    """A loss with its two indicators; None becomes zeros."""
    none_T = torch.zeros_like(loss_T)
    return (
        loss_T,
        none_T if clipped_T is None else clipped_T.to(loss_T.dtype),
        none_T if dual_clipped_T is None else dual_clipped_T.to(loss_T.dtype),
    )


def importance_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor) -> tuple[Tensor, Tensor]:
    """``(exp(d), d)`` with ``d = clamp(log pi - log pi_old, -20, 20)``: two float ``[T]``."""
    log_ratio_T = (logprobs_T - old_logprobs_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio_T.exp(), log_ratio_T


def clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, low: float, high: float, dual_clip: float | None
) -> Loss:
    """``max(-A r, -A clip(r, 1 - low, 1 + high))``; for A < 0 at most ``-A dual_clip``.

    ``dual_clip`` is c > 1, or None; DAPO's clip-higher has ``high > low``.
    Source: https://arxiv.org/abs/1707.06347; dual clip https://arxiv.org/abs/1912.09729;
    clip-higher https://arxiv.org/abs/2503.14476; verl ``compute_policy_loss_vanilla``.
    """
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - low, 1 + high)
    loss_T = torch.maximum(plain_T, clipped_T)
    if dual_clip is None:
        return with_indicators(loss_T, clipped_T > plain_T)
    bound_T = -advantages_T * dual_clip
    was_bounded_T = (advantages_T < 0) & (loss_T > bound_T)
    dual_clipped_T = torch.where(was_bounded_T, bound_T, loss_T)
    return with_indicators(dual_clipped_T, clipped_T > plain_T, was_bounded_T)


def plain_surrogate(ratio_T: Tensor, advantages_T: Tensor) -> Loss:
    """``-A r``: the surrogate without clipping; at ratio 1 its gradient is REINFORCE's."""
    return with_indicators(-advantages_T * ratio_T)


def reinforce(logprobs_T: Tensor, importance_T: Tensor | None, advantages_T: Tensor) -> Loss:
    """``-sg(w) A log pi``: REINFORCE for samples of another policy, w the importance weight against
    the policy that sampled. None: 1, GPG's loss (https://arxiv.org/abs/2504.02546). Source: verl
    ``compute_policy_loss_reinforce`` and ``compute_policy_loss_gpg``."""
    weight_T = 1.0 if importance_T is None else importance_T.detach()
    return with_indicators(-weight_T * advantages_T * logprobs_T)


def dro(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, beta: float) -> Loss:
    """``-(A log pi - beta / 2 (log pi - log pi_old)^2)``: a quadratic penalty, no clipping. Source:
    https://arxiv.org/abs/2405.19107; verl ``compute_policy_loss_dro``."""
    penalty_T = 0.5 * beta * (logprobs_T - old_logprobs_T).square()
    return with_indicators(penalty_T - advantages_T * logprobs_T)


def binary_tv(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """``|p - p_old|``: total variation of "this token or another", float ``[T]``."""
    return (logprobs_T.exp() - old_logprobs_T.exp()).abs()


def binary_kl(logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """``KL(p_old || p)`` of "this token or another" (nats), float ``[T]``.
    ``p_old log(p_old / p) + (1 - p_old) log((1 - p_old + c) / (1 - p + c))``, c = 1e-8."""
    p_T, old_T = logprobs_T.exp(), old_logprobs_T.exp()
    others_T = ((1.0 - old_T + 1e-8) / (1.0 - p_T + 1e-8)).log()
    return old_T * (old_logprobs_T - logprobs_T) + (1.0 - old_T) * others_T


def dppo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    ratio_T: Tensor,
    advantages_T: Tensor,
    divergence_T: Tensor,
    low: float,
    high: float,
    largest_ratio: float | None,
) -> Loss:
    """``-sg(min(r, c)) A log pi`` inside the trust region, else 0: a divergence in PPO's place.

    A token is dropped if its update leads out of the region: for A > 0 if p > p_old and its
    divergence is above ``high``, for A <= 0 if p < p_old and it is above ``low``.

    Divergences are those of :func:`binary_tv` or :func:`binary_kl`; ``largest_ratio`` is c, or
    None. The first indicator is 1 on dropped tokens, the second one where c took effect.
    Source: https://arxiv.org/abs/2602.04879; verl ``compute_policy_loss_dppo_tv`` and ``_kl``.
    """
    weight_T = ratio_T.detach().clamp(max=math.inf if largest_ratio is None else largest_ratio)
    leads_up_T = advantages_T > 0
    inside_T = torch.where(
        leads_up_T,
        (divergence_T <= high) | (logprobs_T <= old_logprobs_T),
        (divergence_T <= low) | (logprobs_T >= old_logprobs_T),
    )
    loss_T = torch.where(inside_T, -weight_T * advantages_T * logprobs_T, 0.0)
    return with_indicators(loss_T, ~inside_T, inside_T & (weight_T < ratio_T.detach()))


def gspo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    low: float,
    high: float,
) -> Loss:
    """Clipped surrogate with one ratio per sequence, its geometric mean.

    ``log s_t = log pi_t - sg(log pi_t) + sg(mean_t(log pi - log pi_old))``, at most 10;
    ``max(-A s, -A clip(s, 1 - low, 1 + high))``. Aggregated as seq-mean-token-mean.

    The paper's low and high are 3e-4 and 4e-4.
    Source: https://arxiv.org/abs/2507.18071; verl ``compute_policy_loss_gspo``.
    """
    mean_B = sequence_mean(logprobs_T - old_logprobs_T, mask_T, cu_seqlens).detach()
    log_ratio_T = logprobs_T - logprobs_T.detach() + expand_to_tokens(mean_B, cu_seqlens)
    ratio_T = log_ratio_T.clamp(-LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT).exp()
    return clipped_surrogate(ratio_T, advantages_T, low, high, None)


def gmpo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    low: float,
    high: float,
) -> Loss:
    """Geometric mean of token ratios, each log-ratio clipped pessimistically to [-low, high].

    ``d'_t = sgn(A) min(sgn(A) d_t, sgn(A) clip(d_t, -low, high))``;
    every token of a sequence has the loss ``-A_t exp(mean_t d')``, whose seq-mean-token-mean is the
    paper's ``-mean_b(mean_t(A) exp(mean_t d'))``.

    The paper's low and high are 0.4.
    Source: https://arxiv.org/abs/2507.20673; verl ``compute_policy_loss_geo_mean``.
    """
    log_ratio_T = logprobs_T - old_logprobs_T
    sign_T = advantages_T.sign()
    clipped_T = log_ratio_T.clamp(-low, high)
    pessimistic_T = sign_T * torch.minimum(sign_T * log_ratio_T, sign_T * clipped_T)
    mean_B = sequence_mean(pessimistic_T, mask_T, cu_seqlens)
    ratio_T = expand_to_tokens(mean_B.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), cu_seqlens)
    was_clipped_T = clipped_T != log_ratio_T
    return with_indicators(
        -advantages_T * ratio_T,
        was_clipped_T & (advantages_T > 0),
        was_clipped_T & (advantages_T < 0),
    )


def cispo(
    logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, low: float, high: float
) -> Loss:
    """``-sg(clip(r, 1 - low, 1 + high)) A log pi``: the weight is clipped, no token is dropped.
    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585; verl ``compute_policy_loss_cispo``."""
    weight_T = ratio_T.detach().clamp(1 - low, 1 + high)
    return with_indicators(-weight_T * advantages_T * logprobs_T, weight_T != ratio_T.detach())


def outside_trust_region(ratio_T: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Where ``r <= 1 - low``, and where ``r >= 1 + high``: two bool ``[T]``. The region is open: a
    ratio on its border lies outside."""
    return ratio_T <= 1 - low, ratio_T >= 1 + high


def dis(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, low: float, high: float) -> Loss:
    """Direct double-sided importance sampling: ``-sg(f(r)) A log pi``.

    ``f(r) = r`` for ``1 - low < r < 1 + high``, else 0, on both sides and whatever the sign of A.
    ``r = pi / pi_engine``: the caller gives the ratio to the policy that sampled. f is a weight
    without a gradient: the gradient is ``-f(r) A grad log pi``. A masked token stays in the
    normaliser, since the paper's expectation is over all sampled tokens.

    The paper's low and high are 0.3 and 5.0 (reasoning), 0.8 and 3.0 (coding). The first indicator
    is 1 on masked tokens, the second one is 0. Source: SAO, https://arxiv.org/abs/2607.07508.
    """
    below_T, above_T = outside_trust_region(ratio_T, low, high)
    masked_T = below_T | above_T
    weight_T = torch.where(masked_T, 0.0, ratio_T).detach()
    return with_indicators(-weight_T * advantages_T * logprobs_T, masked_T)


def sapo(ratio_T: Tensor, advantages_T: Tensor, tau_pos: float, tau_neg: float) -> Loss:
    """``-A (4 / tau) sigmoid(tau (r - 1))``, tau by the sign of A: a soft gate, no clipping.
    Source: https://arxiv.org/abs/2511.20347; verl ``compute_policy_loss_sapo``."""
    tau_T = torch.where(advantages_T > 0, tau_pos, tau_neg).to(ratio_T.dtype)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1.0)) * (4.0 / tau_T)
    return with_indicators(-gate_T * advantages_T)


def clip_cov(
    ratio_T: Tensor, advantages_T: Tensor, selected_T: Tensor, low: float, high: float
) -> Loss:
    """Clipped surrogate, with no loss on the tokens that :func:`covariance_band` selected. Source:
    https://arxiv.org/abs/2505.22617; verl ``compute_policy_loss_clip_cov``."""
    loss_T, _, _ = clipped_surrogate(ratio_T, advantages_T, low, high, None)
    return with_indicators(loss_T * (1.0 - selected_T), selected_T)


def kl_cov(
    ratio_T: Tensor,
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    selected_T: Tensor,
    kl_coef: float,
) -> Loss:
    """``-A r``, plus ``kl_coef |log r|`` on the tokens that :func:`covariance_top` selected.
    Source: https://arxiv.org/abs/2505.22617; verl ``compute_policy_loss_kl_cov``."""
    loss_T = -advantages_T * ratio_T + kl_coef * log_ratio_T.abs() * selected_T
    return with_indicators(loss_T, selected_T)


def ptx_loss(logprobs_T: Tensor, mask_T: Tensor, num_tokens: float) -> Tensor:
    """PPO-ptx's language-model loss on pretraining text: ``-sum(m log pi) / num_tokens``, a scalar.

    The recipe's coefficient is DeepSpeed-Chat's ``unsup_coef`` (27.8) and OpenRLHF's ``ptx_coef``
    (0.05). It adds up over any division of the text batch, whose masked tokens (all but a
    document's first) over all ranks are ``num_tokens``. Source: InstructGPT, equation 2,
    https://arxiv.org/abs/2203.02155.
    """
    return -torch.where(mask_T > 0, logprobs_T * mask_T, 0.0).sum() / max(num_tokens, 1.0)


def _sequence_loss(formula: Callable[..., Loss]) -> PolicyLoss:
    return lambda x: formula(
        x.logprobs_T, x.old_logprobs_T, x.advantages_T, x.mask_T, x.cu_seqlens, x.low, x.high
    )


def _dppo(divergence: Callable[[Tensor, Tensor], Tensor]) -> PolicyLoss:
    def loss(x: LossInputs) -> Loss:
        divergence_T = divergence(x.logprobs_T.detach(), x.old_logprobs_T)
        return dppo(
            x.logprobs_T,
            x.old_logprobs_T,
            x.ratio_T,
            x.advantages_T,
            divergence_T,
            x.low,
            x.high,
            x.dual_clip,
        )

    return loss


def _dro(x: LossInputs) -> Loss:
    assert x.dro_beta is not None, "a rule of the recipe asks for it"
    return dro(x.logprobs_T, x.old_logprobs_T, x.advantages_T, x.dro_beta)


_OWN: dict[str, PolicyLoss] = {
    "vanilla": lambda x: clipped_surrogate(x.ratio_T, x.advantages_T, x.low, x.high, x.dual_clip),
    "gspo": _sequence_loss(gspo),
    "gmpo": _sequence_loss(gmpo),
    "cispo": lambda x: cispo(x.logprobs_T, x.ratio_T, x.advantages_T, x.low, x.high),
    "dis": lambda x: dis(x.logprobs_T, x.ratio_T, x.advantages_T, x.low, x.high),
    "sapo": lambda x: sapo(x.ratio_T, x.advantages_T, x.tau_pos, x.tau_neg),
    "clip_cov": lambda x: clip_cov(x.ratio_T, x.advantages_T, x.selected_T, x.low, x.high),
    "kl_cov": lambda x: kl_cov(x.ratio_T, x.log_ratio_T, x.advantages_T, x.selected_T, x.kl_coef),
    "gpg": lambda x: reinforce(x.logprobs_T, None, x.advantages_T),
    "reinforce": lambda x: reinforce(x.logprobs_T, x.importance_T, x.advantages_T),
    "dppo_tv": _dppo(binary_tv),
    "dppo_kl": _dppo(binary_kl),
    "dro": _dro,
    "plain": lambda x: plain_surrogate(x.ratio_T, x.advantages_T),
}
register.policy_loss.fill(_OWN)

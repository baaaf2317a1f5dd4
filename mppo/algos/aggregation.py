"""Loss aggregation as one weight per token of a mini-batch.

The weights are computed once over the mini-batch, so that ``sum(weight_T * loss_T)`` over any
division into micro-batches and ranks is the same number.
"""

from __future__ import annotations

from torch import Tensor

from mppo.algos.masked import expand_to_tokens, sequence_sum
from mppo.safety.input_error import InputError


def aggregation_weights_T(
    mask_T: Tensor,
    cu_seqlens: Tensor,
    mode: str,
    scale_factor: float = 1.0,
    count_B: Tensor | None = None,
    count_H: Tensor | None = None,
) -> Tensor:
    """Weight of each token's loss.

    With ``N`` masked tokens, ``S`` responses with a masked token, and ``n_b`` masked tokens in
    response b, which is one sequence or several:

    - ``token-mean``: ``1 / N``
    - ``token-sum``: ``1``
    - ``seq-mean-token-sum``: ``1 / S``
    - ``seq-mean-token-mean``: ``1 / (S n_b)``
    - ``seq-mean-token-sum-norm``: ``1 / (S scale_factor)``

    Args:
        scale_factor: for ``seq-mean-token-sum-norm``, in tokens. It is a constant of the run,
            so every batch weighs a token equally (Dr. GRPO, https://arxiv.org/abs/2503.20783).
        count_B: masked tokens of each response of the mini-batch ``[B]``; None: these sequences
            are all, and each is a response.
        count_H: masked tokens of the response to which each sequence belongs ``[H]``; None: each
            sequence is a response.

    Returns float32 ``[T]``, 0 outside the mask. Source: verl ``agg_loss`` (responses without a
    masked token are ignored).
    """
    count_H = sequence_sum(mask_T, cu_seqlens) if count_H is None else count_H
    count_B = count_H if count_B is None else count_B
    num_sequences = (count_B > 0).sum().clamp(min=1).to(mask_T.dtype)
    if mode == "token-mean":
        return mask_T / count_B.double().sum().clamp(min=1.0).to(mask_T.dtype)
    if mode == "token-sum":
        return mask_T.clone()
    if mode == "seq-mean-token-sum":
        return mask_T / num_sequences
    if mode == "seq-mean-token-mean":
        return mask_T / (num_sequences * expand_to_tokens(count_H.clamp(min=1.0), cu_seqlens))
    if mode == "seq-mean-token-sum-norm":
        return mask_T / (num_sequences * scale_factor)
    raise InputError(
        f"loss_agg_mode: unknown mode {mode!r}; use token-mean, token-sum, seq-mean-token-sum, "
        "seq-mean-token-mean or seq-mean-token-sum-norm"
    )

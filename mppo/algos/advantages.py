"""Generalised advantage estimation and reward-to-go on a flat token axis.

Shapes: ``T`` tokens, ``B`` sequences. Tokens outside the mask (prompts, tool output inside a
response) are skipped: the state after token t is the state before the next masked token.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from mppo.algos.scan import reverse_scan, uniform_reverse_scan
from mppo.algos.unique import integers, sorted_unique

_ROW = 64
"""Tokens whose mask values are counted together."""


def gae(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float | Tensor,
) -> Tensor:
    """``A_t = delta_t + gamma lam A_{t+1}``, ``delta_t = r_t + gamma V_{t+1} - V_t``.

    Args:
        rewards_T: float ``[T]``.
        values_T: value of the state before each token, float ``[T]``.
        mask_T: float ``[T]``, 1 on response tokens; other tokens are skipped: ``t + 1`` is the next
            masked token of the same sequence. V is 0 after a sequence's last masked token.
        cu_seqlens: int64 ``[B + 1]``.
        gamma: discount.
        lam: GAE's lambda: one number, or float ``[B]``, one per sequence.

    Returns:
        Advantages, not whitened, float ``[T]``, 0 outside the mask. Returns are
        ``advantages + values``.

    Source: https://arxiv.org/abs/1506.02438; masked tokens as in verl
    ``compute_gae_advantage_return``.
    """
    if not isinstance(lam, Tensor):
        breaks = _run_breaks(mask_T, cu_seqlens)
        if breaks is not None:
            return _gae_of_runs(rewards_T, values_T, mask_T, breaks, gamma, lam)
    return _gae_of_tokens(rewards_T, values_T, mask_T, cu_seqlens, gamma, lam)


def _run_breaks(mask_T: Tensor, cu_seqlens: Tensor) -> Tensor | None:
    """Find the indices t at which the recursion from t + 1 to t is cut.

    Returns:
        Sorted int64 indices t: the mask changes after t, or t ends a sequence. None if the masked
        tokens of some sequence are not one contiguous run.
    """
    last = cu_seqlens[1:] - 1
    breaks = sorted_unique(torch.cat([_changes(mask_T), last[last >= 0]]))
    # a run of masked tokens ends at a break; two run ends in one sequence mean a gap
    run_ends = breaks[mask_T[breaks] > 0]
    run_sequences = torch.searchsorted(cu_seqlens, run_ends, right=True)
    if (run_sequences[1:] == run_sequences[:-1]).any():
        return None
    return breaks


def _changes(mask_T: Tensor) -> Tensor:
    """Sorted int64 indices t with ``mask_t != mask_{t+1}``, for a mask of 0 and 1.

    Masks have few changes, so rows of 64 tokens are counted first, in one pass over memory, and
    only the few rows that may contain a change are compared token by token.
    """
    rows = mask_T[: len(mask_T) - len(mask_T) % _ROW].view(-1, _ROW)
    count = torch.mv(rows, mask_T.new_ones(_ROW))
    # a change lies inside a row that is neither empty nor full, or between rows of unequal count
    mixed = (count[:-1] > 0) & (count[:-1] < _ROW)
    chosen = (mixed | (count[:-1] != count[1:])).nonzero().squeeze(1)
    # each chosen row with the first token of the next one
    index = chosen.unsqueeze(1) * _ROW + torch.arange(_ROW + 1, device=mask_T.device)
    row, column = mask_T[index].diff(dim=1).nonzero(as_tuple=True)
    # the last full row and the incomplete one after it
    rest = max(len(rows) - 1, 0) * _ROW
    return torch.cat([index[row, column], mask_T[rest:].diff().nonzero().squeeze(1) + rest])


def _gae_of_runs(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    breaks: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """GAE for masks that are one run in each sequence: no gather, one buffer."""
    positions = integers(breaks)
    # the last token of a run has no next state: V_{t+1} = 0
    at_breaks = rewards_T[breaks] - values_T[breaks]

    def delta(start: int, stop: int, piece: Tensor) -> None:
        """Write ``delta_t`` of tokens start to stop into ``piece``."""
        torch.sub(rewards_T[start:stop], values_T[start:stop], out=piece)
        following = values_T[start + 1 : stop + 1]
        piece[: len(following)].add_(following, alpha=gamma)
        # at breaks this has added the value of another run: replace it
        here = slice(bisect_left(positions, start), bisect_left(positions, stop))
        piece[breaks[here] - start] = at_breaks[here]
        piece.mul_(mask_T[start:stop])

    return uniform_reverse_scan(delta, gamma * lam, breaks, values_T)


def _gae_of_tokens(
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float | Tensor,
) -> Tensor:
    """GAE for any mask: gather the masked tokens, scan, scatter the result."""
    kept = mask_T.nonzero().squeeze(1)
    advantages_T = torch.zeros_like(values_T)
    if len(kept) == 0:
        return advantages_T
    sequence_N = torch.searchsorted(cu_seqlens, kept, right=True) - 1
    # 1 where the next gathered token belongs to the same sequence
    continues_N = torch.zeros(len(kept), dtype=values_T.dtype, device=values_T.device)
    continues_N[:-1] = (sequence_N[1:] == sequence_N[:-1]).to(values_T.dtype)
    values_N = values_T[kept]
    next_values_N = torch.zeros_like(values_N)
    next_values_N[:-1] = values_N[1:]
    delta_N = rewards_T[kept] + gamma * next_values_N * continues_N - values_N
    lam_N = lam[sequence_N].to(values_T.dtype) if isinstance(lam, Tensor) else lam
    advantages_T[kept] = reverse_scan(delta_N, gamma * lam_N * continues_N)
    return advantages_T


def reward_to_go(rewards_T: Tensor, mask_T: Tensor, cu_seqlens: Tensor, gamma: float) -> Tensor:
    """``G_t = r_t + gamma G_{t+1}`` over the masked tokens; 0 outside the mask.

    Args and shapes as in :func:`gae`.
    """
    return gae(rewards_T, torch.zeros_like(rewards_T), mask_T, cu_seqlens, gamma, 1.0)


def length_adaptive_lambda(length_B: Tensor, alpha: float) -> Tensor:
    """``lam_b = 1 - 1 / (alpha n_b)``, clamped to [0, 1]; 0 for an empty response.

    Args:
        length_B: response tokens of each sequence, ``[B]``.
        alpha: a larger alpha gives a longer horizon.

    Returns:
        float ``[B]``.

    Source: VAPO, https://arxiv.org/abs/2504.05118.
    """
    scaled_B = (alpha * length_B.to(torch.float32)).clamp(min=1.0)
    return torch.where(length_B > 0, 1.0 - 1.0 / scaled_B, 0.0)

"""Attention on a block of the keys, and its gradients, in a form that merges over blocks.

On a GPU torch's flash kernel computes the blocks that it supports (half precision, no edge of a
sliding window inside the block, no soft-cap); all others are matrix products over tiles of queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_QUERIES = 128
"""Queries per tile; scores of one tile exist at a time."""
_WIDEST = 256
"""Largest head dimension of the flash kernel."""


@dataclass(frozen=True)
class BlockAttention:
    """Causal attention of a block of queries on a block of keys.

    Shapes: q ``[rows, queries, heads, dim]``; k and v ``[rows, keys, groups, dim]``, where ``dim``
    of v may differ. ``offset`` is the position of the first query minus that of the first key, at
    least 0. Outputs are float32, or float64 for float64 inputs. A query sees ``window`` keys,
    itself included. Scores have factor ``scale`` (None: ``1 / sqrt(dim)``), then become ``softcap *
    tanh(scores / softcap)``. None: no window, no bound.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """Return the output ``[rows, queries, heads, value_dim]`` and the log-sum-exp of each
        query's scores ``[rows, heads, queries]``; 0 and -inf for a query that sees no key."""
        if self._flash_fits(q, k, v, offset):
            return _flash_forward(q, k, v, offset == 0, self.scale)
        rows, queries, heads, _ = q.shape
        groups, scale = k.shape[2], self._scale(q)
        k, v = _by_group(k, groups), _by_group(v, groups)
        out, lse = [], []
        for part, seen in self._tiles(queries, k.shape[1], offset):
            q_tile = _by_group(q[:, part], groups) * scale
            scores = self._scores(q_tile, k[:, seen], part, offset - seen.start)
            lse_tile = scores.logsumexp(-1, keepdim=True)
            out.append(_by_token(_weights(scores, lse_tile) @ v[:, seen], rows, heads))
            lse.append(lse_tile.view(rows, heads, -1))
        return torch.cat(out, 1), torch.cat(lse, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, offset: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block's share of the gradients of q, k and v, from output and log-sum-exp over
        all blocks. Source: FlashAttention-2, algorithm 2 (https://arxiv.org/abs/2307.08691)."""
        if self._flash_fits(q, k, v, offset):
            return _flash_backward(grad, q, k, v, out, lse, offset == 0, self.scale)
        rows, queries, heads, _ = q.shape
        groups, scale = k.shape[2], self._scale(q)
        # rowsum(dO * O), the term that softmax's Jacobian subtracts from every dP
        delta = (grad.to(lse.dtype) * out).sum(-1).transpose(1, 2)
        k, v = _by_group(k, groups), _by_group(v, groups)
        dq, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
        for part, seen in self._tiles(queries, k.shape[1], offset):
            q_tile, grad_tile = (
                _by_group(q[:, part], groups) * scale,
                _by_group(grad[:, part], groups),
            )
            lse_tile, delta_tile = (
                x[..., part].reshape(*q_tile.shape[:2], 1) for x in (lse, delta)
            )
            scores = self._scores(q_tile, k[:, seen], part, offset - seen.start)
            # before _weights overwrites the scores
            slope = self._slope(scores)
            weights = _weights(scores, lse_tile)
            dv[:, seen].baddbmm_(weights.mT, grad_tile)
            grad_scores = (grad_tile @ v[:, seen].mT - delta_tile) * weights * slope
            dk[:, seen].baddbmm_(grad_scores.mT, q_tile)
            dq.append(_by_token(grad_scores @ k[:, seen] * scale, rows, heads))
        return torch.cat(dq, 1), _by_token(dk, rows, groups), _by_token(dv, rows, groups)

    def _scale(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def _tiles(self, queries: int, keys: int, offset: int) -> Iterator[tuple[slice, slice]]:
        """Tiles of queries, each with the range of keys that any of its queries sees."""
        for first in range(0, queries, _QUERIES):
            last = min(first + _QUERIES, queries)
            end = min(keys, offset + last)
            start = 0 if self.window is None else max(0, offset + first - self.window + 1)
            yield slice(first, last), slice(min(start, end), end)

    def _scores(self, q: Tensor, k: Tensor, part: slice, offset: int) -> Tensor:
        """Scores of scaled queries, -inf for masked keys: ``[batch, repeats * part, keys]``."""
        scores = q @ k.mT
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        # most tiles lie fully below the diagonal and inside the window and need no mask
        first, last, keys = offset + part.start, offset + part.stop - 1, k.shape[1]
        if first < keys - 1 or (self.window is not None and last >= self.window):
            places = torch.arange(first, last + 1, device=q.device)
            before = places[:, None] - torch.arange(keys, device=q.device)
            hidden = before < 0
            if self.window is not None:
                hidden |= before >= self.window
            scores.unflatten(1, (-1, len(places))).masked_fill_(hidden, -torch.inf)
        return scores

    def _slope(self, scores: Tensor) -> Tensor | float:
        if self.softcap is None:
            return 1.0
        return 1 - (scores.clamp(min=-self.softcap) / self.softcap).square()

    def _flash_fits(self, q: Tensor, k: Tensor, v: Tensor, offset: int) -> bool:
        queries, keys, dim = q.shape[1], k.shape[1], q.shape[-1]
        inside_window = self.window is None or offset + queries <= self.window
        return (
            q.is_cuda
            and q.dtype in (torch.bfloat16, torch.float16)
            and v.shape[-1] <= dim <= _WIDEST
            and dim % 8 == 0
            and self.softcap is None
            and inside_window
            and (offset >= keys or (offset == 0 and queries == keys))
        )


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """``exp(scores - lse)``, 0 where both are -inf; overwrites the scores."""
    return scores.sub_(lse.clamp(min=torch.finfo(lse.dtype).min)).exp_()


def _by_group(x: Tensor, groups: int) -> Tensor:
    """``[rows, n, heads, dim]`` to ``[rows * groups, heads / groups * n, dim]``, float32 or 64."""
    x = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(2, (groups, -1))
    return x.permute(0, 2, 3, 1, 4).reshape(x.shape[0] * groups, -1, x.shape[-1])


def _by_token(x: Tensor, rows: int, heads: int) -> Tensor:
    return x.view(rows, heads, -1, x.shape[-1]).transpose(1, 2)


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, _widened(v, q), None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
    )
    return out[..., : v.shape[-1]].float(), lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    no_dropout = [torch.zeros(n, dtype=torch.uint64, device=q.device) for n in ((2,), ())]
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        _widened(grad, q), q, k, _widened(v, q), _widened(out, q), lse.contiguous(), None, None,
        q.shape[1], k.shape[1], 0.0, causal, *no_dropout, scale=scale,
    )  # fmt: skip
    return dq.float(), dk.float(), dv[..., : v.shape[-1]].float()


def _widened(x: Tensor, q: Tensor) -> Tensor:
    """``x`` padded to the queries' width and cast to their dtype: the kernel takes one width."""
    return F.pad(x, (0, q.shape[-1] - x.shape[-1])).to(q.dtype)

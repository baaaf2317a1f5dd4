"""Linear recurrences from the end of a flat axis, without a loop over elements."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_BLOCK = 32
_PIECE = 1 << 21


def reverse_scan(x_N: Tensor, decay_N: Tensor) -> Tensor:
    """``y_i = x_i + decay_i y_{i+1}``, with nothing after the end.

    A decay of 0 ends a segment. Blocks of 32 are scanned by doubling, then the blocks' first
    elements in the same way: O(N) work.

    Args:
        x_N: float ``[N]``.
        decay_N: float ``[N]``.

    Returns:
        float ``[N]``.
    """
    n = len(x_N)
    if n == 0:
        return x_N.clone()
    padding = -n % _BLOCK
    y = torch.nn.functional.pad(x_N, (0, padding)).view(-1, _BLOCK).clone()
    g = torch.nn.functional.pad(decay_N, (0, padding)).view(-1, _BLOCK).clone()
    _scan_blocks_(y, g)
    if len(y) > 1:
        first = reverse_scan(y[:, 0].contiguous(), g[:, 0].contiguous())
        y[:-1] += g[:-1] * first[1:].unsqueeze(1)
    return y.view(-1)[:n]


def _scan_blocks_(y: Tensor, g: Tensor) -> None:
    """Scan each row of ``y`` in place; ``g`` becomes the product of decays to the row's end."""
    step = 1
    while step < y.shape[1]:
        y[:, :-step] += g[:, :-step] * y[:, step:]
        g[:, :-step] = g[:, :-step] * g[:, step:]
        step *= 2


def uniform_reverse_scan(
    n: int, x_of: Callable[[int, int, Tensor], None], decay: float, breaks: Tensor, out_N: Tensor
) -> None:
    """``y_i = x_i + decay y_{i+1}``, where nothing crosses a break.

    As :func:`reverse_scan` with one decay, for long segments. The input is made piece by piece and
    never stands whole in memory. A piece is rows of 32; the rows' first elements are one
    matrix-vector product, scanned as above they are the rows' carries, and with the carries added
    to the rows' last elements one matrix product gives all elements. The few rows that hold a
    break are scanned apart.

    Args:
        n: number of elements.
        x_of: ``x_of(start, stop, piece)`` writes elements start to stop into ``piece``.
        decay: the same for all.
        breaks: int64, sorted: indices i where ``y_i = x_i``; the last one is ``n - 1``.
        out_N: float ``[n]``, written.
    """
    powers = decay ** torch.arange(_BLOCK + 1, dtype=torch.float64)
    lag = torch.arange(_BLOCK)[:, None] - torch.arange(_BLOCK)[None, :]
    matrix = torch.where(lag >= 0, powers[lag.clamp(min=0)], 0.0).to(out_N)
    edges = torch.arange(0, n + _PIECE, _PIECE).clamp(max=n)
    bounds = torch.searchsorted(breaks, edges).tolist()
    scratch = out_N.new_zeros(min(n + -n % _BLOCK, _PIECE))
    carry = out_N.new_zeros(1)
    for piece in reversed(range(len(edges) - 1)):
        start, stop = piece * _PIECE, min((piece + 1) * _PIECE, n)
        x = scratch[: stop - start + (start - stop) % _BLOCK]
        x_of(start, stop, x[: stop - start])
        x[stop - start :] = 0.0
        here = breaks[bounds[piece] : bounds[piece + 1]] - start
        carry = _scan_piece(x.view(-1, _BLOCK), matrix, here, carry, out_N[start:stop])


def _scan_piece(x: Tensor, matrix: Tensor, breaks: Tensor, carry: Tensor, out: Tensor) -> Tensor:
    """Scan one piece into ``out``; returns its first element, the carry of the piece before it.

    Args:
        x: rows ``[r, 32]``, overwritten; zeros beyond ``len(out)``.
        matrix: ``[32, 32]``, powers of the decay.
        breaks: int64, within the piece.
        carry: ``[1]``, the element after the piece.
        out: float, as many as the piece has.
    """
    decay, row_decay = matrix[1, 0], matrix[-1, 0] * matrix[1, 0]
    rows, row_of = torch.unique(breaks // _BLOCK, return_inverse=True)
    broken = x[rows]
    broken_decay = decay.expand_as(broken).clone()
    broken_decay[row_of, breaks % _BLOCK] = 0.0
    _scan_blocks_(broken, broken_decay)
    first = torch.mv(x, matrix[:, 0])
    first_decay = row_decay.expand(len(first)).clone()
    first[rows], first_decay[rows] = broken[:, 0], broken_decay[:, 0]
    first = reverse_scan(torch.cat([first, carry]), torch.cat([first_decay, carry * 0]))
    x[:, -1].add_(first[1:] * decay)
    if len(out) == x.numel():
        y = torch.mm(x, matrix, out=out.view(-1, _BLOCK))
        y[rows] = broken + broken_decay * first[1:][rows].unsqueeze(1)
    else:
        y = torch.mm(x, matrix)
        y[rows] = broken + broken_decay * first[1:][rows].unsqueeze(1)
        out.copy_(y.view(-1)[: len(out)])
    return first[:1]

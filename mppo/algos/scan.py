"""Linear recurrences from the end of a flat axis, without a loop over elements."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_BLOCK = 32
_PIECE = 1 << 18
"""Elements that stay in a core's cache."""


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
    x_of: Callable[[int, int, Tensor], None], decay: float, breaks: Tensor, out_N: Tensor
) -> None:
    """``y_i = x_i + decay y_{i+1}``, where nothing crosses a break.

    As :func:`reverse_scan` with one decay, for long segments. The elements are rows of 32; the
    rows' first elements are a matrix-vector product, scanned as above they are the rows' carries,
    and with the carries added to the rows' last elements a matrix product gives all elements. The
    few rows that hold a break are scanned apart. Both passes go piece by piece, so that what a
    piece needs stays in the cache, and need no buffer beside the output.

    Args:
        x_of: ``x_of(start, stop, piece)`` writes elements start to stop into ``piece``.
        decay: the same for all.
        breaks: int64, sorted: indices i where ``y_i = x_i``; the last one is the last index.
        out_N: float ``[N]``, written.
    """
    n = len(out_N)
    powers = (decay ** torch.arange(_BLOCK + 1, dtype=torch.float64)).to(out_N)
    rows = out_N[: n - n % _BLOCK].view(-1, _BLOCK)
    tail = out_N.new_zeros(1, _BLOCK)
    first = out_N.new_empty(len(rows))
    for start in range(0, n, _PIECE):
        piece = out_N[start : start + _PIECE]
        x_of(start, start + len(piece), piece)
        here = slice(start // _BLOCK, (start + _PIECE) // _BLOCK)
        torch.mv(rows[here], powers[:-1], out=first[here])
    if n % _BLOCK:
        tail[0, : n % _BLOCK] = out_N[len(rows) * _BLOCK :]
        first = torch.cat([first, tail @ powers[:-1]])
    row_B, which = torch.unique(breaks // _BLOCK, return_inverse=True)
    broken = torch.cat([rows[row_B[row_B < len(rows)]], tail])[: len(row_B)]
    broken_decay = powers[1].expand_as(broken).clone()
    broken_decay[which, breaks % _BLOCK] = 0.0
    _scan_blocks_(broken, broken_decay)
    first_decay = powers[-1].expand_as(first).clone()
    first[row_B], first_decay[row_B] = broken[:, 0], broken_decay[:, 0]
    carry = torch.cat([reverse_scan(first, first_decay)[1:], first.new_zeros(1)])
    _scan_rows_(rows, powers, carry)
    broken += broken_decay * carry[row_B].unsqueeze(1)
    if n % _BLOCK:
        out_N[len(rows) * _BLOCK :] = broken[-1, : n % _BLOCK]
        row_B, broken = row_B[:-1], broken[:-1]
    rows[row_B] = broken


def _scan_rows_(rows: Tensor, powers: Tensor, carry: Tensor) -> None:
    """Scan unbroken rows in place, each with the element after it (``carry``, one for a row)."""
    lag = torch.arange(_BLOCK)[:, None] - torch.arange(_BLOCK)[None, :]
    matrix = torch.where(lag >= 0, powers[lag.clamp(min=0)], 0.0)
    scratch = rows.new_empty(_PIECE // _BLOCK, _BLOCK)
    for start in range(0, len(rows), len(scratch)):
        piece = rows[start : start + len(scratch)]
        x = scratch[: len(piece)].copy_(piece)
        x[:, -1].add_(carry[start : start + len(piece)], alpha=float(powers[1]))
        torch.mm(x, matrix, out=piece)

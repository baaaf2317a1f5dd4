"""Linear recurrences from the end of a flat axis, without a loop over elements."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_BLOCK = 32
_PIECE = 1 << 18
"""Elements that stay in a core's cache."""

_SHORT = 1 << 14
"""So few rows are carried by the general scan."""


def reverse_scan(x_N: Tensor, decay_N: Tensor) -> Tensor:
    """``y_i = x_i + decay_i y_{i+1}``, with nothing after the end.

    A decay of 0 ends a segment. All blocks of 32 are scanned side by side, then the blocks' first
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
    y, g = (
        torch.nn.functional.pad(part_N, (0, -n % _BLOCK)).view(-1, _BLOCK).t().contiguous()
        for part_N in (x_N, decay_N)
    )
    _scan_columns_(y, g)
    if y.shape[1] > 1:
        first = reverse_scan(y[0], g[0])
        y[:, :-1].addcmul_(g[:, :-1], first[1:])
    return y.t().reshape(-1)[:n]


def _scan_columns_(y: Tensor, g: Tensor) -> None:
    """Scan each column of 32 in place; ``g`` becomes the product of decays to the column's end."""
    rows, decays = y.unbind(), g.unbind()
    for row in reversed(range(_BLOCK - 1)):
        rows[row].addcmul_(decays[row], rows[row + 1])
        decays[row].mul_(decays[row + 1])


def uniform_reverse_scan(
    x_of: Callable[[int, int, Tensor], object], decay: float, breaks: Tensor, like_N: Tensor
) -> Tensor:
    """``y_i = x_i + decay y_{i+1}``, where nothing crosses a break.

    As :func:`reverse_scan` with one decay, for long segments. The elements are rows of 32; the
    rows' first elements are a matrix-vector product, scanned likewise they are the rows' carries,
    and with the carries added to the rows' last elements a matrix product gives all elements. The
    few rows that hold a break are scanned apart. Both passes go piece by piece, so that what a
    piece needs stays in the cache; the second writes one piece before what it reads, in one buffer.

    Args:
        x_of: ``x_of(start, stop, piece)`` writes elements start to stop into ``piece``.
        decay: the same for all.
        breaks: int64, sorted: indices i where ``y_i = x_i``; the last one is the last index.
        like_N: as many elements, of the dtype and on the device of the result.

    Returns:
        float ``[N]``.
    """
    n = len(like_N)
    powers = (decay ** torch.arange(_BLOCK + 1, dtype=torch.float64)).to(like_N)
    buffer = like_N.new_empty(n + _PIECE)
    x_N, out_N = buffer[_PIECE:], buffer[:n]
    rows = x_N[: n - n % _BLOCK].view(-1, _BLOCK)
    tail = x_N.new_zeros(1, _BLOCK)
    first = x_N.new_empty(len(rows))
    for start in range(0, n, _PIECE):
        piece = x_N[start : start + _PIECE]
        x_of(start, start + len(piece), piece)
        here = slice(start // _BLOCK, (start + _PIECE) // _BLOCK)
        torch.mv(rows[here], powers[:-1], out=first[here])
    if n % _BLOCK:
        tail[0, : n % _BLOCK] = x_N[len(rows) * _BLOCK :]
        first = torch.cat([first, tail @ powers[:-1]])
    row_B, which = torch.unique(breaks // _BLOCK, return_inverse=True)
    broken = torch.cat([rows[row_B[row_B < len(rows)]], tail])[: len(row_B)].t().contiguous()
    broken_decay = powers[1].expand_as(broken).clone()
    broken_decay[breaks % _BLOCK, which] = 0.0
    _scan_columns_(broken, broken_decay)
    first[row_B] = broken[0]
    carry = torch.cat([_scan_firsts(first, powers[-1], row_B)[1:], first.new_zeros(1)])
    out_rows = out_N[: rows.numel()].view(-1, _BLOCK)
    _scan_rows(rows, powers, carry, out_rows)
    broken = broken.addcmul_(broken_decay, carry[row_B]).t()
    if n % _BLOCK:
        out_N[len(rows) * _BLOCK :] = broken[-1, : n % _BLOCK]
        row_B, broken = row_B[:-1], broken[:-1]
    out_rows[row_B] = broken
    return out_N


def _scan_firsts(first: Tensor, decay: Tensor, breaks: Tensor) -> Tensor:
    """Scan the rows' first elements; a row that holds a break takes nothing from those after it."""
    if len(first) > _SHORT:
        return uniform_reverse_scan(
            lambda start, stop, piece: piece.copy_(first[start:stop]), float(decay), breaks, first
        )
    decays = decay.expand_as(first).clone()
    decays[breaks] = 0.0
    return reverse_scan(first, decays)


def _scan_rows(rows: Tensor, powers: Tensor, carry: Tensor, out: Tensor) -> None:
    """Scan unbroken rows, each with the element after it (``carry``, one for a row), into ``out``.

    ``out`` may lie one piece before ``rows`` in one buffer; ``rows`` are overwritten.
    """
    lag = torch.arange(_BLOCK)[:, None] - torch.arange(_BLOCK)[None, :]
    matrix = torch.where(lag >= 0, powers[lag.clamp(min=0)], 0.0)
    for start in range(0, len(rows), _PIECE // _BLOCK):
        here = slice(start, min(start + _PIECE // _BLOCK, len(rows)))
        rows[here, -1].add_(carry[here], alpha=float(powers[1]))
        torch.mm(rows[here], matrix, out=out[here])

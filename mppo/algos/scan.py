"""Linear recurrences from the end of a flat axis, vectorised over blocks of elements."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mppo.algos.unique import unique_index

_BLOCK = 32
"""Elements per row; each row is scanned alone, then receives a carry from the next row."""
_PIECE = 1 << 18
"""Elements per piece: a piece fits a core's cache."""
_SHORT = 1 << 14
"""Up to this number of rows their first elements are scanned by ``reverse_scan``."""


def reverse_scan(x_N: Tensor, decay_N: Tensor) -> Tensor:
    """``y_i = x_i + decay_i y_{i+1}``, with 0 after the last element.

    A decay of 0 ends a segment. All blocks of 32 are scanned side by side, then the blocks' first
    elements in the same way, recursively: O(N) work.

    Args:
        x_N: float ``[N]``.
        decay_N: float ``[N]``.

    Returns:
        float ``[N]``.
    """
    n = len(x_N)
    if n == 0:
        return x_N.clone()
    # one block per column, so that a step of the scan is one operation on contiguous memory
    y, g = (
        torch.nn.functional.pad(part_N, (0, -n % _BLOCK)).view(-1, _BLOCK).t().contiguous()
        for part_N in (x_N, decay_N)
    )
    _scan_columns_(y, g)
    if y.shape[1] > 1:
        # y[0] is each block's scan without the blocks after it; scanning y[0] completes it
        first = reverse_scan(y[0], g[0])
        y[:, :-1].addcmul_(g[:, :-1], first[1:])
    return y.t().reshape(-1)[:n]


def _scan_columns_(y: Tensor, g: Tensor) -> None:
    """Scan the columns of ``y`` in place; ``g`` becomes the decays' product to a column's end."""
    rows, decays = y.unbind(), g.unbind()
    for row in reversed(range(_BLOCK - 1)):
        rows[row].addcmul_(decays[row], rows[row + 1])
        decays[row].mul_(decays[row + 1])


def uniform_reverse_scan(
    x_of: Callable[[int, int, Tensor], object], decay: float, breaks: Tensor, like_N: Tensor
) -> Tensor:
    """``y_i = x_i + decay y_{i+1}``, and ``y_i = x_i`` at breaks.

    Equals :func:`reverse_scan` with one decay, and is faster for long segments. The elements form
    rows of 32. A matrix-vector product gives each row's first element as if no row followed; a scan
    of these first elements gives the carry into each row; with the carry added to the row's last
    element, a matrix product gives all elements. The few rows with a break are scanned separately.
    Both passes run piece by piece so that a piece stays in the cache. The second pass writes one
    piece ahead of what it reads, so one buffer holds input and result.

    Args:
        x_of: ``x_of(start, stop, piece)`` writes elements start to stop into ``piece``.
        decay: the decay of all elements.
        breaks: int64, sorted: indices i where ``y_i = x_i``; the last one is the last index.
        like_N: tensor with the length, dtype and device of the result.

    Returns:
        float ``[N]``.
    """
    n = len(like_N)
    powers = (decay ** torch.arange(_BLOCK + 1, dtype=torch.float64)).to(like_N)
    # the input lies one piece behind the result: the second pass never overwrites unread input
    buffer = like_N.new_empty(n + _PIECE)
    x_N, out_N = buffer[_PIECE:], buffer[:n]
    rows = x_N[: n - n % _BLOCK].view(-1, _BLOCK)
    tail = x_N.new_zeros(1, _BLOCK)
    first = x_N.new_empty(len(rows))
    # first pass: compute the input, and each row's first element as if nothing followed the row
    for start in range(0, n, _PIECE):
        piece = x_N[start : start + _PIECE]
        x_of(start, start + len(piece), piece)
        here = slice(start // _BLOCK, (start + _PIECE) // _BLOCK)
        torch.mv(rows[here], powers[:-1], out=first[here])
    # the incomplete last row, padded with zeros
    if n % _BLOCK:
        tail[0, : n % _BLOCK] = x_N[len(rows) * _BLOCK :]
        first = torch.cat([first, tail @ powers[:-1]])
    # rows with a break (always the last row): scan these few with a decay of 0 at the break
    row_B, which, _ = unique_index(breaks // _BLOCK)
    broken = torch.cat([rows[row_B[row_B < len(rows)]], tail])[: len(row_B)].t().contiguous()
    broken_decay = powers[1].expand_as(broken).clone()
    broken_decay[breaks % _BLOCK, which] = 0.0
    _scan_columns_(broken, broken_decay)
    first[row_B] = broken[0]
    # a row's carry is the completed first element of the next row
    carry = torch.cat([_scan_firsts(first, powers[-1], row_B)[1:], first.new_zeros(1)])
    # second pass: all rows as if unbroken, then the rows with breaks are replaced
    out_rows = out_N[: rows.numel()].view(-1, _BLOCK)
    _scan_rows(rows, powers, carry, out_rows)
    broken = broken.addcmul_(broken_decay, carry[row_B]).t()
    if n % _BLOCK:
        out_N[len(rows) * _BLOCK :] = broken[-1, : n % _BLOCK]
        row_B, broken = row_B[:-1], broken[:-1]
    out_rows[row_B] = broken
    return out_N


def _scan_firsts(first: Tensor, decay: Tensor, breaks: Tensor) -> Tensor:
    """Scan the rows' first elements; no carry passes through a row with a break."""
    if len(first) > _SHORT:
        return uniform_reverse_scan(
            lambda start, stop, piece: piece.copy_(first[start:stop]), float(decay), breaks, first
        )
    decays = decay.expand_as(first).clone()
    decays[breaks] = 0.0
    return reverse_scan(first, decays)


def _scan_rows(rows: Tensor, powers: Tensor, carry: Tensor, out: Tensor) -> None:
    """Scan rows without breaks into ``out``; ``carry`` is the element after each row.

    ``out`` may start one piece before ``rows`` in the same buffer; ``rows`` are overwritten.
    """
    # y_row = x_row @ matrix, matrix[j, i] = decay^(j - i) for j >= i
    lag = torch.arange(_BLOCK)[:, None] - torch.arange(_BLOCK)[None, :]
    matrix = torch.where(lag >= 0, powers[lag.clamp(min=0)], 0.0)
    for start in range(0, len(rows), _PIECE // _BLOCK):
        here = slice(start, min(start + _PIECE // _BLOCK, len(rows)))
        rows[here, -1].add_(carry[here], alpha=float(powers[1]))
        torch.mm(rows[here], matrix, out=out[here])

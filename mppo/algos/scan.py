"""Linear recurrences from the end of a flat axis, without a loop over elements."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 32
_CHUNK = 1 << 22


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


def uniform_reverse_scan_(x_N: Tensor, decay: float, breaks: Tensor) -> None:
    """``y_i = x_i + decay y_{i+1}``, written over ``x``; nothing crosses a break.

    As :func:`reverse_scan` with one decay, where segments are long: the rows of a ``[N/32, 32]``
    view are scanned by one matrix product, the few rows that hold a break apart.

    Args:
        x_N: float ``[N]``, overwritten.
        decay: the same for all.
        breaks: int64, sorted: indices i where ``y_i = x_i``.
    """
    powers = decay ** torch.arange(_BLOCK + 1, dtype=torch.float64)
    lag = torch.arange(_BLOCK)[:, None] - torch.arange(_BLOCK)[None, :]
    matrix = torch.where(lag >= 0, powers[lag.clamp(min=0)], 0.0).to(x_N)
    to_end = powers[1:].flip(0).to(x_N)
    edges = torch.arange(0, len(x_N) + _CHUNK, _CHUNK).clamp(max=len(x_N))
    bounds = torch.searchsorted(breaks, edges).tolist()
    scratch = x_N.new_empty(min(len(x_N), _CHUNK) + _BLOCK)
    carry = x_N.new_zeros(1)
    for chunk in reversed(range(len(edges) - 1)):
        start = chunk * _CHUNK
        local = x_N[start : start + _CHUNK]
        here = breaks[bounds[chunk] : bounds[chunk + 1]] - start
        carry = _scan_chunk_(local, scratch, matrix, to_end, here, carry)


def _scan_chunk_(
    x_N: Tensor, scratch: Tensor, matrix: Tensor, to_end: Tensor, breaks: Tensor, carry: Tensor
) -> Tensor:
    """One chunk of :func:`uniform_reverse_scan_`; returns its first element, the next carry.

    A chunk that is no multiple of the block (only the last) is scanned in a padded copy.
    """
    n = len(x_N)
    if n % _BLOCK:
        padded = torch.nn.functional.pad(x_N, (0, -n % _BLOCK))
        ends = torch.unique(torch.cat([breaks, breaks.new_tensor([n - 1])]))
        first = _scan_chunk_(padded, scratch, matrix, to_end, ends, carry)
        x_N.copy_(padded[:n])
        return first
    x = x_N.view(-1, _BLOCK)
    y = scratch[:n].view(-1, _BLOCK)
    torch.mm(x, matrix, out=y)
    block_decay = to_end[0].expand(len(y)).clone()
    rows, row_of = torch.unique(breaks // _BLOCK, return_inverse=True)
    broken_y = x[rows]
    broken_g = to_end[-1].expand_as(broken_y).clone()
    broken_g[row_of, breaks % _BLOCK] = 0.0
    _scan_blocks_(broken_y, broken_g)
    y[rows] = broken_y
    block_decay[rows] = broken_g[:, 0]
    first = reverse_scan(torch.cat([y[:, 0], carry]), torch.cat([block_decay, carry * 0]))
    torch.addr(y, first[1:], to_end, out=x)
    x[rows] = broken_y + broken_g * first[1:][rows].unsqueeze(1)
    return first[:1]

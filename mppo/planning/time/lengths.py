"""Lengths of responses of which only the mean and the maximum are known."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quantiles(mean: float, longest: int, count: int) -> list[int]:
    """Ascending lengths, at least 1, of ``count`` responses with a mean and a maximum.

    They are the quantiles of the distribution with the greatest entropy among those on
    ``0..longest`` with this mean, a truncated exponential (Jaynes 1957); nothing else is known.
    """
    if mean >= longest:
        return [longest] * count
    rate = _rate(mean / longest)
    shares = [(i + 0.5) / count for i in range(count)]
    if abs(rate) < 1e-6:
        return [max(1, round(share * longest)) for share in shares]
    whole = -math.expm1(-rate)
    return [max(1, round(-math.log1p(-share * whole) / rate * longest)) for share in shares]


def _rate(mean: float) -> float:
    """Rate of the exponential on 0..1 with a mean, by bisection."""
    low, high = -500.0, 500.0
    for _ in range(80):
        rate = (low + high) / 2
        found = 0.5 if abs(rate) < 1e-9 else 1 / rate - 1 / math.expm1(rate)
        low, high = (rate, high) if found > mean else (low, rate)
    return (low + high) / 2


def scattered(lengths: Sequence[int]) -> list[int]:
    """The same lengths in an order without trend, so that every prefix has about the same mean:
    steps of the golden ratio through the sorted list (Weyl's equidistribution)."""
    order = sorted(range(len(lengths)), key=lambda i: (i + 1) * 0.6180339887498949 % 1)
    return [lengths[i] for i in order]

"""The costs of an update as whole numbers, in which a simulation adds and compares times exactly.

Sums of floats that are equal in real numbers differ in their last digits. A list whose order
followed such times would put an optimizer step before or after a pass at random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from mppo.pipeline.actions import RoleWork

_DIGITS = 6
"""Decimal digits of the largest cost that are kept besides its first one."""


@dataclass(frozen=True)
class Costs:
    """The costs of an update's passes (``[role][stage]``, of one chunk, at least 1) and of its
    reductions and steps (``[role]``), in ticks."""

    forward: list[tuple[int, ...]]
    backward: list[tuple[int, ...]]
    reduce: list[int]
    step: list[int]
    ticks_per_unit: Fraction

    @staticmethod
    def of(roles: Sequence[RoleWork], stages: int) -> Costs:
        """Convert the costs of all roles; the same on every rank. Costs are rounded to decimal
        digits, so that 3.1 and 3 * 3.1 keep their ratio, and in such ticks that a role's passes
        divide evenly into its chunks."""
        passes = [
            [cost if isinstance(cost, tuple) else (cost,) * stages for cost in costs]
            for costs in ((role.forward, role.backward) for role in roles)
        ]
        assert all(len(costs) == stages for costs_of_role in passes for costs in costs_of_role)
        single = [cost for role in roles for cost in (role.reduce, role.step)]
        largest = max((max(map(max, costs)) for costs in passes), default=0.0)
        largest = max(largest, *single, 0.0) or 1.0
        decimal = Fraction(10) ** (_DIGITS - math.floor(math.log10(largest)))
        even = math.lcm(*(role.chunks for role in roles))

        def ticks(cost: float, chunks: int = 1) -> int:
            return round(Fraction(cost) * decimal) * even // chunks

        forward, backward = (
            [
                tuple(max(1, ticks(cost, role.chunks)) for cost in costs[direction])
                for role, costs in zip(roles, passes, strict=True)
            ]
            for direction in (0, 1)
        )
        return Costs(
            forward=forward,
            backward=backward,
            reduce=[ticks(role.reduce) for role in roles],
            step=[ticks(role.step) for role in roles],
            ticks_per_unit=decimal * even,
        )

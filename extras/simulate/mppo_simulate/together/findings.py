"""What simulated ranks do to each other that they must not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mppo.pipeline.deadlock import Rules
from mppo_simulate.records import RankRecord
from mppo_simulate.together.hangs import Hang, find_hangs
from mppo_simulate.together.matching import Mismatch, match


@dataclass(frozen=True)
class Findings:
    """What ranks do to each other that they must not.

    Args:
        mismatches: communications that do not match.
        races: descriptions of accesses without an order, with the rank.
        hangs: rules under which the ranks wait for ever; empty if communications do not match.
    """

    mismatches: list[Mismatch]
    races: list[str]
    hangs: list[Hang]

    @property
    def found(self) -> bool:
        """Whether there is any."""
        return bool(self.mismatches or self.races or self.hangs)


def find(records: Sequence[RankRecord], rules: Sequence[Rules]) -> Findings:
    """Find mismatches, races and hangs among recorded ranks."""
    mismatches = match(records)
    races: dict[str, str] = {}
    for record in records:
        for race in record.races:
            races.setdefault(race.describe(), f"rank {record.rank}, {race.describe()}")
    hangs = [] if mismatches else find_hangs(records, rules)
    return Findings(mismatches, list(races.values()), hangs)

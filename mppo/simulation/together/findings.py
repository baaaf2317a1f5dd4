"""What simulated ranks do to each other that they must not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mppo.simulation.records import RankRecord
from mppo.simulation.together.matching import Mismatch, match


@dataclass(frozen=True)
class Findings:
    """What ranks do to each other that they must not.

    Args:
        mismatches: communications that do not match.
        races: descriptions of accesses without an order, with the rank.
    """

    mismatches: list[Mismatch]
    races: list[str]

    @property
    def found(self) -> bool:
        """Whether there is any."""
        return bool(self.mismatches or self.races)


def find(records: Sequence[RankRecord]) -> Findings:
    """Find mismatches and races among recorded ranks."""
    races: dict[str, str] = {}
    for record in records:
        for race in record.races:
            races.setdefault(race.describe(), f"rank {record.rank}, {race.describe()}")
    return Findings(match(records), list(races.values()))

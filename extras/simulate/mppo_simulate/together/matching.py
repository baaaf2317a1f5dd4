"""Whether the communications of several ranks fit together.

NCCL's communicators execute everything in one order and messages have no tags, so for each group
the ranks must start the same collectives in the same order, and for each pair of ranks and group
the messages sent must be those received. What no simulated rank does is not checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mppo_simulate.records import RankRecord, Recorded


class Participant(NamedTuple):
    """A record of a rank; None: the rank has no such record."""

    rank: int
    record: Recorded | None

    def describe(self) -> str:
        """One line."""
        what = "nothing more" if self.record is None else self.record.describe()
        return f"rank {self.rank}: {what}"


@dataclass(frozen=True)
class Mismatch:
    """The first communication of a group, or of a pair of ranks, that does not fit.

    Args:
        kind: "collective", "message" or "split".
        group: what the group is for, and its ranks.
        number: number of the communication in its group or pair, from 0.
        one, two: the records of two ranks.
    """

    kind: str
    group: str
    number: int
    one: Participant
    two: Participant

    def describe(self) -> str:
        """Three lines."""
        return (
            f"{self.kind} {self.number} of {self.group} does not match:\n"
            f"  {self.one.describe()}\n  {self.two.describe()}"
        )


def match(ranks: Sequence[RankRecord]) -> list[Mismatch]:
    """Find the first mismatch of every group and of every pair of ranks in a group."""
    collectives: dict[tuple, dict[int, list[Recorded]]] = defaultdict(dict)
    messages: dict[tuple, dict[str, list[Recorded]]] = defaultdict(lambda: defaultdict(list))
    simulated = {one.rank for one in ranks}
    for one in ranks:
        for record in one.records:
            if record.kind == "collective":
                key = record.group, record.ranks, record.on_host
                collectives[key].setdefault(one.rank, []).append(record)
            elif record.kind in ("send", "receive") and record.peer in simulated:
                pair = (one.rank, record.peer)
                ends = pair if record.kind == "send" else pair[::-1]
                messages[record.group, record.ranks, ends][record.kind].append(record)
    found = []
    for (group, members, _), by_rank in collectives.items():
        lists = {rank: by_rank.get(rank, []) for rank in members if rank in simulated}
        found += _collectives(_name(group, members, lists), lists)
    for (group, members, (sender, receiver)), both in messages.items():
        lists = {sender: both["send"], receiver: both["receive"]}
        name = _name(group, members, lists)
        found += _messages(f"{name} from rank {sender} to {receiver}", lists)
    return found


def _collectives(group: str, lists: dict[int, list[Recorded]]) -> list[Mismatch]:
    first = min(lists)
    for number in range(max(map(len, lists.values()))):
        places = [Participant(rank, _at(records, number)) for rank, records in lists.items()]
        one = next(place for place in places if place.rank == first)
        for two in places:
            if _agreed(one.record) != _agreed(two.record):
                return [Mismatch("collective", group, number, one, two)]
        bad = _split_mismatch(places)
        if bad is not None:
            return [Mismatch("split", group, number, *bad)]
    return []


def _messages(group: str, lists: dict[int, list[Recorded]]) -> list[Mismatch]:
    (sender, sent), (receiver, received) = lists.items()
    for number in range(max(len(sent), len(received))):
        one, two = _at(sent, number), _at(received, number)
        if one is None or two is None or one.form != two.form:
            return [
                Mismatch(
                    "message", group, number, Participant(sender, one), Participant(receiver, two)
                )
            ]
    return []


def _split_mismatch(places: Sequence[Participant]) -> tuple[Participant, Participant] | None:
    """Two ranks of an all-to-all of which one sends other rows than the other one receives."""
    for sender in places:
        for receiver in places:
            one, two = sender.record, receiver.record
            if one is None or two is None or not one.splits:
                continue
            sent = one.splits[0][one.ranks.index(receiver.rank)]
            received = two.splits[1][two.ranks.index(sender.rank)]
            if sent != received:
                return sender, receiver
    return None


def _agreed(record: Recorded | None) -> tuple | None:
    return None if record is None else (record.operation, record.form)


def _at(records: Sequence[Recorded], number: int) -> Recorded | None:
    return records[number] if number < len(records) else None


def _name(group: str, members: Sequence[int], lists: dict[int, list[Recorded]]) -> str:
    known = (record.purpose for records in lists.values() for record in records)
    return f"group {group} ({next(known, '')}, ranks {_short(members)})"


def _short(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return shown + (f", ... {ranks[-1]}" if len(ranks) > 4 else "")

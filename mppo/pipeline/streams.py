"""The order in which micro-batches of several roles enter a pipeline.

Every stage computes its forward passes in this order, and its backward passes too. ``after`` is the
number of backward passes that a stage must have computed before it starts an entry's forward pass:
it covers all mini-batches whose optimizer steps the entry needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from mppo.config.schedule import ScheduleKind
from mppo.pipeline.actions import RoleWork

KINDS: tuple[ScheduleKind, ...] = ("sequential", "fused", "flush_free")


@dataclass(frozen=True)
class StreamEntry:
    """A micro-batch in a stream.

    Args:
        role: index of the role.
        mini_batch: index of the mini-batch within the role's update.
        micro_batch: index of the micro-batch within the mini-batch.
        after: the backward passes of ``stream[:after]`` precede this entry's forward pass.
    """

    role: int
    mini_batch: int
    micro_batch: int
    after: int


Stream = tuple[StreamEntry, ...]


def candidate_streams(kind: ScheduleKind, roles: Sequence[RoleWork]) -> list[Stream]:
    """List the streams that a kind of schedule permits; the first one is its usual form.

    Args:
        kind: "sequential" drains the pipeline after every mini-batch of every role. "fused" drains
            it after the i-th mini-batches of all roles, whose steps are then taken together.
            "flush_free" never drains it: a mini-batch waits only for the previous step of its own
            role.
        roles: passes, optimizer steps and costs of each role.
    """
    found: dict[Stream, None] = {}
    if kind == "flush_free":
        for order in permutations(range(len(roles))):
            found[_stream(roles, list(_spread(roles, order)), _after_own_step)] = None
            found[_stream(roles, list(_rounds(roles, order)), _after_own_step)] = None
    if kind != "sequential":
        for order in permutations(range(len(roles))):
            found[_stream(roles, list(_rounds(roles, order)), _after_round)] = None
    found[_stream(roles, list(_rounds(roles, range(len(roles)))), _after_all)] = None
    return list(found)


def _rounds(roles: Sequence[RoleWork], order: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (role, mini-batch, micro-batch): the i-th mini-batch of every role, then the next."""
    for i in range(max((len(role.micro_batches) for role in roles), default=0)):
        for role in order:
            if i < len(roles[role].micro_batches):
                for j in range(roles[role].micro_batches[i]):
                    yield role, i, j


def _spread(roles: Sequence[RoleWork], order: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Like ``_rounds``, but roles with fewer mini-batches than others are spread over all rounds.

    Their micro-batches are divided evenly, so that they keep the pipeline full in every round.
    """
    rounds = max((len(role.micro_batches) for role in roles), default=0)
    slots = [
        [(i, j) for i, count in enumerate(role.micro_batches) for j in range(count)]
        for role in roles
    ]
    for i in range(rounds):
        for role in order:
            mine = slots[role]
            if len(roles[role].micro_batches) == rounds:
                yield from ((role, i, j) for j in range(roles[role].micro_batches[i]))
            else:
                part = mine[i * len(mine) // rounds : (i + 1) * len(mine) // rounds]
                yield from ((role, *slot) for slot in part)


def _after_own_step(slots: Sequence[tuple[int, int, int]], n: int) -> int:
    """``after`` for "flush_free": wait for the role's previous mini-batch."""
    role, i, _ = slots[n]
    return 1 + max((k for k in range(n) if slots[k][:2] == (role, i - 1)), default=-1)


def _after_round(slots: Sequence[tuple[int, int, int]], n: int) -> int:
    """``after`` for "fused": wait for all mini-batches of earlier rounds."""
    return 1 + max((k for k in range(n) if slots[k][1] < slots[n][1]), default=-1)


def _after_all(slots: Sequence[tuple[int, int, int]], n: int) -> int:
    """``after`` for "sequential": wait for all entries before the mini-batch."""
    return next(k for k in range(n + 1) if slots[k][:2] == slots[n][:2])


def _stream(roles: Sequence[RoleWork], slots: list[tuple[int, int, int]], after) -> Stream:
    entries: list[StreamEntry] = []
    known: dict[tuple[int, int], int] = {}
    for n, (role, i, j) in enumerate(slots):
        if (role, i) not in known:
            known[role, i] = after(slots, n)
        entries.append(StreamEntry(role, i, j, known[role, i]))
    return tuple(entries)

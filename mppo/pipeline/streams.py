"""The order in which micro-batches of several roles enter a pipeline.

Every stage computes forward passes in this order, and backward passes in this order. ``after`` says
how many backward passes a stage must have done before it may begin an entry's forward pass: all of
the mini-batches whose optimizer steps the entry needs.
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
        mini_batch, micro_batch: its numbers.
        after: entries before it whose backward passes come first: ``stream[:after]``.
    """

    role: int
    mini_batch: int
    micro_batch: int
    after: int


Stream = tuple[StreamEntry, ...]


def candidate_streams(kind: ScheduleKind, roles: Sequence[RoleWork]) -> list[Stream]:
    """Streams that keep the rules of a kind; the first one is its usual form.

    Args:
        kind: "sequential" empties the pipeline after every mini-batch of every role; "fused" after
            the i-th mini-batches of all roles, whose steps are then taken together; "flush_free"
            never, but a role's mini-batch waits for that role's step before it.
        roles: what there is to do.
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
    """The i-th mini-batch of every role that has one, then the next."""
    for i in range(max((len(role.micro_batches) for role in roles), default=0)):
        for role in order:
            if i < len(roles[role].micro_batches):
                for j in range(roles[role].micro_batches[i]):
                    yield role, i, j


def _spread(roles: Sequence[RoleWork], order: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """As ``_rounds`` for the roles with most mini-batches; the micro-batches of the others are
    divided evenly over all rounds, and so keep the pipeline full there too."""
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
    """The role's mini-batch before this one."""
    role, i, _ = slots[n]
    return 1 + max((k for k in range(n) if slots[k][:2] == (role, i - 1)), default=-1)


def _after_round(slots: Sequence[tuple[int, int, int]], n: int) -> int:
    """All mini-batches of the rounds before."""
    return 1 + max((k for k in range(n) if slots[k][1] < slots[n][1]), default=-1)


def _after_all(slots: Sequence[tuple[int, int, int]], n: int) -> int:
    """All that is before the mini-batch."""
    return next(k for k in range(n + 1) if slots[k][:2] == slots[n][:2])


def _stream(roles: Sequence[RoleWork], slots: list[tuple[int, int, int]], after) -> Stream:
    entries: list[StreamEntry] = []
    known: dict[tuple[int, int], int] = {}
    for n, (role, i, j) in enumerate(slots):
        if (role, i) not in known:
            known[role, i] = after(slots, n)
        entries.append(StreamEntry(role, i, j, known[role, i]))
    return tuple(entries)

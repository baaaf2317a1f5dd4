"""The order in which micro-batches of several roles enter a pipeline.

Every stage computes its forward passes in the order of the stream's entries. An entry is a
micro-batch or, if a role's pipeline is interleaved, one chunk of a micro-batch. As in Megatron's
interleaved schedule, as many micro-batches as there are stages form a group: they pass through the
first chunks of all stages, then through the second chunks, and so on. The backward passes have the
same order, except that a group passes through its chunks from last to first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations

from mppo.pipeline.actions import RoleWork
from mppo.recipe.schedule_kind import ScheduleKind

KINDS: tuple[ScheduleKind, ...] = ("sequential", "fused", "flush_free")


@dataclass(frozen=True)
class StreamEntry:
    """One chunk of a micro-batch in a stream.

    Args:
        role: index of the role.
        chunk: index of the chunk on each stage; 0 without interleaving.
        after: the first ``after`` backward passes of a stage precede this entry's forward pass
            there. They include all mini-batches whose optimizer steps the entry needs.
        previous: index of the entry of the previous chunk, whose output on the last stage is the
            input of this entry on the first stage; None for the first chunk.
        following: index of the entry of the next chunk, whose gradient from the first stage this
            entry needs on the last stage; None for the last chunk.
    """

    role: int
    mini_batch: int
    micro_batch: int
    chunk: int
    after: int
    previous: int | None = None
    following: int | None = None


@dataclass(frozen=True)
class Stream:
    """The order of a schedule's passes; the same on every stage.

    Args:
        entries: the forward passes in order.
        backward: the backward passes in order, as indices of ``entries``.
        together: all roles take their i-th steps together, before any (i+1)-th mini-batch starts.
    """

    entries: tuple[StreamEntry, ...]
    backward: tuple[int, ...]
    together: bool


def candidate_streams(kind: ScheduleKind, roles: Sequence[RoleWork], stages: int) -> list[Stream]:
    """List the streams that a kind of schedule permits; the first one is its usual form.

    "sequential" drains the pipeline after every mini-batch of every role. "fused" drains it after
    the i-th mini-batches of all roles, whose steps are then taken together. "flush_free" never
    drains it: a mini-batch waits only for the previous step of its own role. Each kind also permits
    the streams of the kinds before it.
    """
    make = partial(_stream, roles, stages)
    orders = list(permutations(range(len(roles))))
    streams = []
    if kind == "flush_free":
        for order in orders:
            streams += [
                make(_spread(roles, order, stages), _after_own_step, together=False),
                make(_rounds(roles, order), _after_own_step, together=False),
                make(_rounds(roles, order), _after_round, together=False),
            ]
    if kind != "sequential":
        streams += [make(_rounds(roles, order), _after_round) for order in orders]
    streams.append(make(_rounds(roles, orders[0]), _after_all))
    return list(dict.fromkeys(streams))


_Slot = tuple[int, int, int]
"""Index of the role, index of the mini-batch, index of the micro-batch."""

_After = Callable[[Sequence[_Slot], int], int]
"""Maps the slots of all passes, and the index of a mini-batch's first one, to its ``after``."""


def _rounds(roles: Sequence[RoleWork], order: Sequence[int]) -> Iterator[_Slot]:
    """Yield (role, mini-batch, micro-batch): the i-th mini-batch of every role, then the next."""
    for i in range(max((len(role.micro_batches) for role in roles), default=0)):
        for role in order:
            if i < len(roles[role].micro_batches):
                for j in range(roles[role].micro_batches[i]):
                    yield role, i, j


def _spread(roles: Sequence[RoleWork], order: Sequence[int], stages: int) -> Iterator[_Slot]:
    """Like ``_rounds``, but roles with fewer mini-batches than others are spread over all rounds.
    Their micro-batches (with interleaving: groups of them) are divided evenly, so that they keep
    the pipeline full in every round."""
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
                size = _group_size(roles[role], stages)
                groups = len(mine) // size
                part = mine[i * groups // rounds * size : (i + 1) * groups // rounds * size]
                yield from ((role, *slot) for slot in part)


def _group_size(role: RoleWork, stages: int) -> int:
    """Number of consecutive micro-batches that pass through a chunk before the next chunk."""
    return stages if role.chunks > 1 else 1


def _after_own_step(slots: Sequence[_Slot], n: int) -> int:
    """``after`` for "flush_free": wait for the role's previous mini-batch."""
    role, i, _ = slots[n]
    return 1 + max((k for k in range(n) if slots[k][:2] == (role, i - 1)), default=-1)


def _after_round(slots: Sequence[_Slot], n: int) -> int:
    """``after`` for "fused": wait for all mini-batches of earlier rounds."""
    return 1 + max((k for k in range(n) if slots[k][1] < slots[n][1]), default=-1)


def _after_all(slots: Sequence[_Slot], n: int) -> int:
    """``after`` for "sequential": wait for all entries before the mini-batch."""
    return next(k for k in range(n + 1) if slots[k][:2] == slots[n][:2])


def _stream(
    roles: Sequence[RoleWork],
    stages: int,
    micro_batches: Iterable[_Slot],
    after: _After,
    together: bool = True,
) -> Stream:
    entries: list[StreamEntry] = []
    backward: list[int] = []
    slots = list(micro_batches)
    passes = [slot for slot in slots for _ in range(roles[slot[0]].chunks)]
    known: dict[tuple[int, int], int] = {}
    at = 0
    while at < len(slots):
        role, i, _ = slots[at]
        size, chunks, begin = _group_size(roles[role], stages), roles[role].chunks, len(entries)
        group = slots[at : at + size]
        assert [slot[:2] for slot in group] == [(role, i)] * size, "a group is not complete"
        at += size
        if (role, i) not in known:
            known[role, i] = after(passes, begin)
        for chunk in range(chunks):
            for _, _, j in group:
                n = len(entries)
                previous = n - size if chunk else None
                following = n + size if chunk < chunks - 1 else None
                entry = StreamEntry(role, i, j, chunk, known[role, i], previous, following)
                entries.append(entry)
        for chunk in reversed(range(chunks)):
            backward += range(begin + chunk * size, begin + (chunk + 1) * size)
    return Stream(tuple(entries), tuple(backward), together)

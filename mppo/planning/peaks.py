"""Memory of one rank by phase: the parts of its roles, and what a phase allocates."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from mppo.planning.memory import Memory
from mppo.planning.outside import NCCL_COMMUNICATOR, TRAINER_CONTEXT, communicators
from mppo.planning.passes import StagePasses
from mppo.planning.residency import (
    GENERATION,
    ON_DEVICE,
    SAVE,
    WEIGHT_SYNC,
    Part,
    Place,
    Residency,
    phase_of_role,
    role_parts,
)
from mppo.recipe.schema import Recipe


@dataclass(frozen=True)
class RankPart:
    memory: Memory
    passes: StagePasses

    @property
    def name(self) -> str:
        return self.passes.role.name


@dataclass(frozen=True)
class Use:
    """What a phase allocates on a rank besides the parts of the roles.

    Args:
        extra: bytes at the peak.
        role: the role that computes; None: none does.
        roles: roles whose parts exist; None: all.
    """

    name: str
    phase: str
    extra: int
    role: str | None = None
    roles: tuple[str, ...] | None = None


@dataclass(frozen=True)
class RankUse:
    """Memory of one rank, before it is decided where the parts are.

    Args:
        parts: bytes of each part of each role.
        buffers: bytes that live as long as the roles, outside their parts.
    """

    parts: Mapping[str, Mapping[Part, int]]
    buffers: int
    uses: Sequence[Use]
    communicators: int

    @property
    def outside(self) -> int:
        """Bytes outside torch's allocator: CUDA context and communicators."""
        return TRAINER_CONTEXT + self.communicators * NCCL_COMMUNICATOR

    def largest(self, phase: str) -> Use:
        """What allocates most in a phase of the table, apart from building the roles."""
        found = [use for use in self.uses if use.phase == phase and use.roles is None]
        return max(found, key=lambda use: use.extra)

    def held(self, use: Use, table: Residency) -> dict[str, int]:
        """Bytes of each role's parts that are on the device during a phase."""
        chosen = self.parts if use.roles is None else use.roles
        return {name: self.role_bytes(name, table[use.phase], ON_DEVICE) for name in chosen}

    def role_bytes(
        self, name: str, places: Mapping[str, Mapping[Part, Place]], where: Sequence[Place]
    ) -> int:
        return sum(n for part, n in self.parts[name].items() if places[name][part] in where)

    def peak(self, use: Use, table: Residency) -> int:
        """Most bytes that torch's allocator hands out in a phase."""
        buffers = self.buffers if use.roles is None else 0
        return sum(self.held(use, table).values()) + buffers + use.extra

    def host(self, table: Residency) -> int:
        """Most bytes of parts in host memory at once."""
        return max(
            sum(self.role_bytes(name, places, ("host",)) for name in self.parts)
            for places in table.values()
        )


def rank_use(recipe: Recipe, parts: Sequence[RankPart], streamed: int, rank: int) -> RankUse:
    """The memory of one rank; ``parts`` are in the order in which the roles are built, ``streamed``
    bytes are of a weight sync."""
    buffers: dict[Hashable, int] = {}
    for part in parts:
        for buffer, size in part.passes.buffers.items():
            buffers[buffer] = max(size, buffers.get(buffer, 0))
    return RankUse(
        {part.name: _part_bytes(part) for part in parts},
        sum(buffers.values()),
        [*_building(parts), *_computing(recipe, parts), Use("weight sync", WEIGHT_SYNC, streamed),
         Use("save", SAVE, 0), Use("generation", GENERATION, 0)],
        communicators(
            (
                (
                    part.passes.layout,
                    part.passes.has_experts,
                    part.passes.trained,
                    part.passes.role.megatron.moe_router_bias_update_rate > 0,
                )
                for part in parts
            ),
            rank,
        ),
    )  # fmt: skip


def _part_bytes(part: RankPart) -> dict[Part, int]:
    memory = part.memory
    sizes: dict[Part, int] = {
        "parameters": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
    }
    return {name: sizes[name] for name in role_parts(part.passes.role)}


def _building(parts: Sequence[RankPart]) -> list[Use]:
    """Roles are built one after another; those that are built wait as in generation."""
    names = tuple(part.name for part in parts)
    return [
        Use(f"building {part.name}", GENERATION, part.memory.building, part.name, names[:number])
        for number, part in enumerate(parts)
    ]


def _computing(recipe: Recipe, parts: Sequence[RankPart]) -> list[Use]:
    trained = [part for part in parts if part.passes.trained]
    # through one pipeline, what is on its way may be another role's
    streamed = [
        p.passes.sent for p in parts if p.passes.streams_forward and p.name != "reward_model"
    ]
    found = [
        Use(f"forward passes of {part.name}", phase_of_role(recipe, "forward", part.name),
            part.passes.forward + max(part.passes.sent, *streamed, 0), part.name)
        for part in parts
        if part.name != "actor" or recipe.needs_actor_logprobs
    ]  # fmt: skip
    return found + [
        Use(f"updating {part.name}", phase_of_role(recipe, "update", part.name),
            _update(part, trained), part.name)
        for part in trained
    ]  # fmt: skip


def _update(part: RankPart, trained: Sequence[RankPart]) -> int:
    """A role's current pass, and the micro-batches in flight besides: those in a list of a schedule
    may be of several mini-batches and of the other role."""
    passes = part.passes
    room = passes.in_flight - passes.chunk
    if not passes.overlaps_updates:
        return int(passes.update + room * passes.kept)
    others = 0.0
    for one in sorted((p.passes for p in trained), key=lambda one: one.kept, reverse=True):
        left = one.micro_batches * one.mini_batches - passes.chunk * (one is passes)
        count = min(room, left)
        others, room = others + count * one.kept, room - count
    return int(passes.update + others)

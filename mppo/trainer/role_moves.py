"""Carries out the table of who is where in which phase: the one place that moves parts of roles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from mppo.models.role import Role
from mppo.planning.residency import GENERATION, REWARD, WEIGHT_SYNC, Part, Place, Residency
from mppo.supervision.phase import phase


class RolePlacement:
    """Moves the parts of roles between device and host memory at the changes of phase.

    Copies run beside the computation. What the table calls returning comes back during the phase
    before its use, and that phase does not wait for it. In the phase that uses them, weights are
    awaited on the device by the computation that is queued first, the optimizer's state by the
    optimizer step, so that it can arrive during the passes. Memory that is on its way to the host
    is free for others once the copy is complete: ``device.give_back_memory`` waits for that.
    """

    def __init__(self, table: Residency) -> None:
        self._table = table
        self._roles: dict[str, Role] = {}
        self.phase = GENERATION

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(self._table)

    @property
    def moves_weights(self) -> bool:
        """Whether the weights of the actor are in host memory during generation."""
        return self._table[GENERATION]["actor"]["parameters"] != "device"

    @property
    def host_nbytes(self) -> int:
        return sum(self.host_by_role.values())

    @property
    def host_by_role(self) -> dict[str, int]:
        found = {}
        for name, role in self._roles.items():
            found[name] = role.weights.storages.host_nbytes
            if role.optimizer is not None:
                found[name] += role.optimizer.state.host_nbytes
        return found

    def add(self, role: Role) -> None:
        self._roles[role.name] = role
        with phase(f"building {role.name}"):
            self._place({role.name: self._table[self.phase][role.name]})

    def enter(self, phase: str, early: bool = True) -> None:
        """Place all parts for a phase of the table. Parts leave before others come, whose memory
        may be theirs; ``early``: parts of the next phase come back where the table says so."""
        self.phase = phase
        self._place({name: self._table[phase][name] for name in self._roles})
        for name, role in self._roles.items() if early else ():
            for part, place in self._table[phase][name].items():
                if place == "returning":
                    _movable(role, part).arrive()

    def prepare(self, *kinds: Literal["reward", "forward", "update"]) -> None:
        """Enter the first phase of these kinds, if there is one, before its batch is there."""
        first = next((phase for phase in self._table if phase.split()[0] in kinds), None)
        if first is not None:
            self.enter(first)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Inside the context the reward model can score; after it everything is as before."""
        before = self.phase
        self.enter(REWARD, early=False)  # in validation no forward pass comes next
        try:
            yield
        finally:
            self.enter(before, early=False)

    @contextmanager
    def sending_weights(self) -> Iterator[None]:
        """Inside the context the weights of the actor can be read; after it begins generation.
        Servers that are restarted receive the weights again, at any time."""
        self.enter(WEIGHT_SYNC)
        try:
            yield
        finally:
            self.enter(GENERATION)

    def _place(self, places: Mapping[str, Mapping[Part, Place]]) -> None:
        reads_only = self.phase.startswith((GENERATION, REWARD, "forward", WEIGHT_SYNC))
        coming = []
        for name, by_part in places.items():
            for part, place in by_part.items():
                movable = _movable(self._roles[name], part)
                if place == "device":
                    coming.append(movable)
                elif place != "returning":
                    movable.leave()
        for movable in coming:
            movable.arrive()
        for name, by_part in places.items():
            role = self._roles[name]
            if by_part["parameters"] == "device":
                role.weights.storages.wait()
                role.weights.storages.changed |= not reads_only
            if role.optimizer is not None and by_part["optimizer"] == "device":
                role.optimizer.state.changed |= not reads_only


def _movable(role: Role, part: Part):
    """What can start to ``leave`` the device and to ``arrive`` there; no effect if it has."""
    if part == "parameters":
        return role.weights.storages
    assert role.optimizer is not None, f"{role.name} is frozen"
    return role.optimizer.gradients if part == "gradients" else role.optimizer.state

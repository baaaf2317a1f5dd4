"""The state of a run in a checkpoint: its parts, its roles, and the start of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mppo.batch.episode import EpisodesBySample
from mppo.checkpoint.role_state import load_role
from mppo.models.role import Role
from mppo.safety.input_files import read_json

STATE = "run.json"
"""File of a checkpoint with the states that are neither tensors nor random."""


class Stateful(Protocol):
    """A part of the run whose state is JSON-serialisable."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class StepStart:
    """State (JSON) at the start of a step, of what the step changes before its first update."""

    parts: str
    random: bytes
    partial: EpisodesBySample


def load_roles(folder: Path, roles: Mapping[str, Role]) -> None:
    """Load the models and optimizers of a checkpoint. Collective. ValueError, KeyError, TypeError,
    OSError: the folder is not a checkpoint, is damaged, or has other models."""
    counters = read_json(folder / STATE, nan=True)["roles"]
    for name, role in roles.items():
        load_role(role, folder / name, counters[name])

"""A mini-batch whose numbers are not finite: kept by the loop, and computed again to find where."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mppo.batch.outputs import Experience
from mppo.checkpoint.role_state import load_roles
from mppo.dumps.experience_files import named_tensors, read_experience, read_one_file
from mppo.dumps.stale import stale_reason
from mppo.hub.builtin import read_model_config
from mppo.models.role import Role
from mppo.parallel import device
from mppo.parallel.collectives import all_gather_objects
from mppo.parallel.groups import GroupRegistry
from mppo.parallel.launch import LaunchInfo
from mppo.parallel.process_group import process_group
from mppo.planning.residency import SAVE, phase_of_role
from mppo.recipe.load import load_recipe
from mppo.safety.disk import replace_text
from mppo.safety.input_files import read_json
from mppo.supervision.first_rank import on_first_rank
from mppo.supervision.rank_guard import RankGuard
from mppo.trainer.dump import write_shares
from mppo.trainer.run_roles import Roles
from mppo.trainer.update.update_stage import UpdatePhase
from mppo.weights.torch_dist.contents import METADATA, read_checkpoint

CASE, MODELS = "case.json", "models"
_EARLIER = "experience.safetensors"
"""Cases of earlier versions have one file of all sequences, and no number of ranks."""


@dataclass(frozen=True)
class ReplayCase:
    """A mini-batch whose loss or gradient was not finite (indices of its sequences), and its
    origin; the recipe is plain values without secrets."""

    step: int
    mini_batch: tuple[int, ...]
    model: str
    recipe: dict[str, Any]
    ranks: int


def keep_case(folder: Path, case: ReplayCase, experience: Experience) -> None:
    """Write the case and the step's experience, shared out; an earlier case of the same step is
    renamed. Collective."""
    write_shares(folder, experience)
    text = json.dumps(asdict(case), indent=1) + "\n"
    on_first_rank(lambda: replace_text(folder / CASE, text))


def load_case(folder: Path) -> tuple[ReplayCase, Experience]:
    """Load what ``keep_case`` wrote; the experience is that of all sequences. A folder without a
    valid case raises ValueError, KeyError, TypeError or OSError."""
    values = read_json(folder / CASE, nan=True)
    if (folder / _EARLIER).exists():
        return ReplayCase(**values, ranks=1), read_one_file(folder / _EARLIER)
    case = ReplayCase(**values)
    return case, read_experience(folder, case.ranks)


_NO_CASE = (ValueError, KeyError, TypeError, OSError)
"""Errors from reading a folder without a valid case, or with a case of other models."""
_SHOWN = 5
"""Findings of one kind shown per role; later ones are consequences of the first."""


def not_finite(experience: Experience) -> list[str]:
    """The tensors of the batch with numbers that are not finite: how many, and the first index."""
    found = []
    for name, tensor in named_tensors(experience).items():
        bad = ~torch.isfinite(tensor) if tensor.is_floating_point() else torch.zeros(0)
        if bad.any():
            first = int(bad.flatten().nonzero()[0])
            found.append(
                f"batch: {name} has {int(bad.sum())} of {tensor.numel()}, first at {first}"
            )
    return found


@contextmanager
def watching_layers(role: Role, found: list[str]) -> Iterator[None]:
    """Append to ``found`` the modules of this rank whose output is not finite, in their order."""

    def inspect(name: str, module, inputs, output) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                bad = int((~torch.isfinite(tensor)).sum())
                if bad:
                    found.append(f"{role.name}: output of {name} has {bad} of {tensor.numel()}")

    handles = [
        module.register_forward_hook(partial(inspect, f"chunk {i} {name}"))
        for i, stage in enumerate(role.stages)
        for name, module in stage.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gradients_not_finite(role: Role) -> list[str]:
    """The parameters of this rank whose accumulated gradient is not finite."""
    found = []
    for i, stage in enumerate(role.stages):
        for name, parameter in stage.named_parameters():
            gradient = parameter.main_grad  # pyright: ignore[reportAttributeAccessIssue] (Megatron's)
            bad = int((~torch.isfinite(gradient)).sum())
            if bad:
                total = parameter.numel()
                found.append(f"{role.name}: gradient of chunk {i} {name} has {bad} of {total}")
    return found


def replay(case: ReplayCase, experience: Experience, roles: Roles) -> list[str]:
    """Run a saved case again, with the roles of that step; findings of this rank in the order of
    computation. Collective."""
    found = not_finite(experience)
    for update in UpdatePhase(roles, experience, case.step, actor_frozen=False).updates:
        outputs: list[str] = []
        roles.placement.enter(phase_of_role(roles.recipe, "update", update.role.name))
        with watching_layers(update.role, outputs):
            update.run_once(experience.old.batch, tuple(case.mini_batch))
        found += outputs[:_SHOWN]
        found += gradients_not_finite(update.role)[:_SHOWN]
        if not math.isfinite(update.role.loss):
            found.append(f"{update.role.name}: loss {update.role.loss}")
        statistics = update.stats[-1]
        bad = sorted(name for name, value in statistics.items() if not math.isfinite(value))
        found += [f"{update.role.name}: statistics {', '.join(bad)}"] if bad else []
    return found


def has_case(folder: Path) -> bool:
    return (folder / CASE).is_file()


def replay_case(folder: Path, info: LaunchInfo, guard: RankGuard) -> int:
    """Replay a case and print the findings of every rank; return the exit code 0, or 2 for a case
    that cannot be read, or has pickles that would run code. Collective."""
    stale = stale_reason(folder)
    if stale is not None and info.rank == 0:
        print(f"{folder}: a case of lost work: {stale}")
    try:
        for table in sorted((folder / MODELS).glob(f"*/{METADATA}")):
            read_checkpoint(table.parent)
        device.check()
        case, experience = load_case(folder)
        recipe = load_recipe(case.recipe)
        guard.set_limit(recipe.trainer.heartbeat_timeout_s)
    except _NO_CASE as error:
        return _refuse(folder, error)
    device.prepare_megatron()
    guard.watch_other_nodes()
    with process_group(info, recipe.trainer.collective_timeout_s):
        guard.met()
        registry = GroupRegistry(recipe.trainer.seed)
        try:
            roles = Roles(recipe, Path(case.model), read_model_config, registry, total_steps=1)
            roles.placement.enter(SAVE)
            load_roles(folder / MODELS, roles.trained)
        except _NO_CASE as error:
            return _refuse(folder, error)
        everyone = all_gather_objects(replay(case, experience, roles))
    if info.rank == 0:
        for rank, lines in enumerate(everyone):
            for line in lines or ["everything is finite"]:
                print(f"rank {rank}: {line}")
    return 0


def _refuse(folder: Path, error: Exception) -> int:
    print(f"mppo: {folder}: cannot be replayed: {' '.join(str(error).split())}", file=sys.stderr)
    return 2

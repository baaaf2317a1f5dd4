"""Choosing the checkpoint to resume from: the newest intact one of this run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mppo.checkpoint import folder as folders
from mppo.checkpoint.folder import Manifest
from mppo.parallel.collectives import all_gather_objects, broadcast_object
from mppo.recipe.errors import ConfigError, config_error
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.trainer import TrainerConfig
from mppo.safety.disk import Damaged, Files, check_contents, check_sizes
from mppo.weights.torch_dist.contents import read_checkpoint

_NOT_COMPARED = (
    "trainer.default_local_dir", "trainer.resume_mode", "trainer.resume_from_path",
    "trainer.on_existing_run", "trainer.on_changed_data",
)  # fmt: skip

_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@dataclass(frozen=True)
class Found:
    folder: Path
    manifest: Manifest


def choose(
    trainer: TrainerConfig,
    root: Path,
    roles: Mapping[str, Mapping[str, Any]],
    say: Callable[[str], None],
) -> Found | None:
    """Choose the checkpoint to resume from, the same on every rank; None if the run has none or
    ``resume_mode`` is disable. Collective; writes nothing.

    Raises:
        ConfigError: ``resume_from_path`` is damaged; all checkpoints are; or the checkpoint is of
            another model or a newer format.
    """
    mode = resume_mode(trainer, root)
    if mode == "disable":
        return None
    if mode == "resume_path":
        key, value = "trainer.resume_from_path", trainer.resume_from_path
        candidates = [Path(value)] if value else []
        if not candidates or not candidates[0].is_dir():
            raise _refusal(key, value, "is not a folder", "name a global_step_N folder")
    else:
        key, value = "trainer.default_local_dir", str(root.parent)
        candidates = _agreed(folders.list_checkpoints(root))
    for candidate in candidates:
        try:
            manifest = folders.read_manifest(candidate)
        except Damaged as error:
            problem = str(error)
        except ValueError as error:
            raise _refusal(key, value, str(error), "or set trainer.resume_mode=disable") from error
        else:
            check_models(key, value, candidate, manifest, roles)
            problem = first_problem(candidate, manifest.files)
            if problem is None and key == "trainer.resume_from_path":
                _check_readable(trainer, candidate, manifest)
        if problem is None:
            return Found(candidate, manifest)
        say(f"damaged checkpoint skipped: {problem}")
    if candidates:
        raise _refusal(
            key,
            value,
            f"none of its {len(candidates)} checkpoints is intact (the newest: {candidates[0]})",
            "restore one, or set trainer.resume_mode=disable to start again from step 0",
        )
    return None


def resume_mode(trainer: TrainerConfig, root: Path) -> str:
    """``trainer.resume_mode``; auto for a job restarted by its launcher, if it has checkpoints."""
    restarts = [os.environ.get(name, "0") for name in _RESTART_COUNTS]
    restarted = any(count.isdigit() and int(count) > 0 for count in restarts)
    own = _agreed(folders.list_checkpoints(root)) if restarted else []
    return "auto" if own else trainer.resume_mode


def _agreed(candidates: list[Path]) -> list[Path]:
    """The first rank's list: folders may appear while others look."""
    return broadcast_object(candidates)


def first_problem(folder: Path, files: Files) -> str | None:
    """The first problem of a folder's files, of which each rank compares a share. Collective."""
    mine = None
    try:
        check_sizes(folder, files)
        check_contents(folder, files, dist.get_rank(), dist.get_world_size())
    except Damaged as error:
        mine = str(error)
    return next((problem for problem in all_gather_objects(mine) if problem), None)


def check_models(
    key: str,
    value: Any,
    candidate: Path,
    manifest: Manifest,
    roles: Mapping[str, Mapping[str, Any]],
) -> None:
    """Raise ConfigError if a role is missing in a checkpoint, or its model is not this run's."""
    fix = "use another trainer.default_local_dir, or set trainer.resume_mode=disable"
    for role, mine in roles.items():
        if role not in manifest.roles:
            raise _refusal(key, value, f"{candidate} has no {role}, which this recipe trains", fix)
        saved = manifest.roles[role]["model"]
        different = [
            f"{name} is {saved.get(name)} there, {mine.get(name)} here"
            for name in sorted({*mine, *saved})
            if mine.get(name) != saved.get(name)
        ]
        if different:
            why = f"{candidate} holds another model as {role}: {'; '.join(different)}"
            raise _refusal(key, value, why, fix)


def _check_readable(trainer: TrainerConfig, candidate: Path, manifest: Manifest) -> None:
    """Read ``resume_from_path`` before the run's own folder is changed; ConfigError if it fails."""
    try:
        for role in manifest.roles:
            read_checkpoint(candidate / role)
    except (ValueError, OSError) as error:
        raise not_usable(trainer, candidate, error) from error


def not_usable(trainer: TrainerConfig, folder: Path, error: Exception) -> ConfigError:
    if trainer.resume_from_path and Path(trainer.resume_from_path) == folder:
        key, value = "trainer.resume_from_path", trainer.resume_from_path
    else:
        key, value = "trainer.default_local_dir", str(folder)
    lacks = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    why, _, fix = lacks.partition("; ")
    return _refusal(key, value, why, fix or "use another checkpoint, or the recipe that wrote it")


def _refusal(key: str, value: Any, why: str, fix: str) -> ConfigError:
    return config_error(key, value, why, fix, source="resume")


def changed_keys(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield the recipe keys whose values differ, as ``key: old -> new``. A key that the older
    version of mppo did not have counts as its default."""
    defaults = dict(_flat(Recipe().model_dump(mode="json")))
    old, new = dict(_flat(before)), dict(_flat(now))
    for key in sorted({*old, *new}):
        was = old[key] if key in old else defaults.get(key)
        if was != new.get(key) and key not in _NOT_COMPARED:
            yield f"{key}: {was} -> {new.get(key)}"


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

"""Choosing the checkpoint to go on from: the newest that is whole and belongs to this run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mppo.checkpoint import folder as folders
from mppo.checkpoint.folder import Damaged, Manifest
from mppo.config.errors import ConfigError, Fault
from mppo.config.schema import TrainerConfig
from mppo.weights.pickles import check_pickles

_NOT_COMPARED = ("trainer.default_local_dir", "trainer.resume_mode", "trainer.resume_from_path")

_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@dataclass(frozen=True)
class Found:
    """A checkpoint that was checked."""

    folder: Path
    manifest: Manifest


def choose(
    trainer: TrainerConfig,
    root: Path,
    roles: Mapping[str, Mapping[str, Any]],
    say: Callable[[str], None],
) -> Found | None:
    """The checkpoint to go on from, the same on every rank. Collective.

    Args:
        trainer: ``resume_mode`` is "auto" or "resume_path".
        root: the run's checkpoints.
        roles: ``describe_model`` of each trained role.
        say: shows a line.

    Returns:
        None where there is none yet.

    Raises:
        ConfigError: the one asked for is damaged; all are; or it belongs to another model or a
            newer mppo.
    """
    if resume_mode(trainer, root) == "resume_path":
        key, value = "trainer.resume_from_path", trainer.resume_from_path
        candidates = [Path(value)] if value else []
        if not candidates or not candidates[0].is_dir():
            raise _refusal(key, value, "is not a folder", "name a global_step_N folder")
    else:
        key, value = "trainer.default_local_dir", str(root.parent)
        candidates = _agreed(folders.list_checkpoints(root))
        if dist.get_rank() == 0:
            _remove_partial(root)
    for candidate in candidates:
        try:
            manifest = folders.read_manifest(candidate)
        except Damaged as error:
            problem = str(error)
        except ValueError as error:
            raise _refusal(key, value, str(error), "or set trainer.resume_mode=disable") from error
        else:
            _check_models(key, value, candidate, manifest, roles)
            problem = _first_problem(candidate, manifest)
            if problem is None and key == "trainer.resume_from_path":
                _check_stranger(key, value, candidate, manifest)
        if problem is None:
            return Found(candidate, manifest)
        say(f"damaged checkpoint passed over: {problem}")
    if candidates:
        raise _refusal(
            key,
            value,
            f"none of its {len(candidates)} checkpoints is whole (the newest: {candidates[0]})",
            "restore one, or set trainer.resume_mode=disable to start anew beside them",
        )
    return None


def has_checkpoints(trainer: TrainerConfig, root: Path) -> bool:
    """Whether a run under ``root`` will go on from a checkpoint of its own. Collective."""
    return resume_mode(trainer, root) == "auto" and bool(_agreed(folders.list_checkpoints(root)))


def resume_mode(trainer: TrainerConfig, root: Path) -> str:
    """``trainer.resume_mode``; a job its launcher restarts goes on from its own checkpoints."""
    restarts = [os.environ.get(name, "0") for name in _RESTART_COUNTS]
    restarted = any(count.isdigit() and int(count) > 0 for count in restarts)
    own = _agreed(folders.list_checkpoints(root)) if restarted else []
    return "auto" if own else trainer.resume_mode


def set_aside_all(root: Path) -> Path | None:
    """Move a run's checkpoints out of the way of a new start. Collective.

    Returns:
        Where they are now; None where there were none.

    Raises:
        ConfigError: they cannot be moved.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0 and folders.list_checkpoints(root):
        try:
            outcome = [folders.set_aside(root), None]
        except OSError as error:
            outcome = [None, error.strerror]
    dist.broadcast_object_list(outcome, src=0)
    kept, problem = outcome
    if problem is not None:
        why = f"the checkpoints in {root} cannot be moved aside ({problem})"
        raise _refusal("trainer.resume_mode", "disable", why, "use another folder")
    return kept


def _agreed(candidates: list[Path]) -> list[Path]:
    """The first rank's list: folders may appear while others look."""
    shared = [candidates]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _remove_partial(root: Path) -> None:
    """Leftovers of saves that were killed."""
    for path in root.glob(".global_step_*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def _first_problem(candidate: Path, manifest: Manifest) -> str | None:
    """What is wrong with the files, every rank having read its share of them."""
    mine = None
    try:
        folders.check_sizes(candidate, manifest)
        folders.check_contents(candidate, manifest, dist.get_rank(), dist.get_world_size())
    except Damaged as error:
        mine = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, mine)
    return next((problem for problem in problems if problem), None)


def _check_models(
    key: str,
    value: Any,
    candidate: Path,
    manifest: Manifest,
    roles: Mapping[str, Mapping[str, Any]],
) -> None:
    cure = "use another trainer.default_local_dir, or set trainer.resume_mode=disable"
    for role, mine in roles.items():
        if role not in manifest.roles:
            raise _refusal(key, value, f"{candidate} has no {role}, this recipe trains one", cure)
        theirs = manifest.roles[role]["model"]
        different = [
            f"{name} {theirs.get(name)} there, {mine.get(name)} here"
            for name in sorted({*mine, *theirs})
            if mine.get(name) != theirs.get(name)
        ]
        if different:
            why = f"{candidate} holds another model as {role}: {'; '.join(different)}"
            raise _refusal(key, value, why, cure)


def _check_stranger(key: str, value: Any, candidate: Path, manifest: Manifest) -> None:
    """A folder outside the run's own may hold what runs when it is loaded."""
    try:
        for role in manifest.roles:
            check_pickles(candidate / role)
    except ValueError as error:
        cure = "use a checkpoint you trust, from the run's own folder (resume_mode=auto)"
        raise _refusal(key, value, str(error).partition("; ")[0], cure) from error


def _refusal(key: str, value: Any, why: str, cure: str) -> ConfigError:
    return ConfigError([Fault(key, value, why, cure)], source="resume")


def changed_keys(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Recipe keys whose values differ, as ``key: old -> new``."""
    old, new = dict(_flat(before)), dict(_flat(now))
    for key in sorted({*old, *new}):
        if old.get(key) != new.get(key) and key not in _NOT_COMPARED:
            yield f"{key}: {old.get(key)} -> {new.get(key)}"


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

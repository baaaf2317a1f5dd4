"""Checkpoint folders: names, manifests, checksums, which are complete and which may go.

``<run>/checkpoints/global_step_10/`` holds ``manifest.json`` (written last), ``run.json``, one
Megatron distributed checkpoint per trained role and one random-state file per rank. It is built
under ``.global_step_10.partial`` and renamed when every file is on disk, so a folder that bears the
final name was whole when it got it; the manifest's sizes and checksums say whether it still is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mppo.safety import disk
from mppo.safety.disk import Damaged, FileEntry, flush, set_aside, write_bytes
from mppo.safety.input_files import read_json

FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"global_step_(\d+)")
MAX_NUMBER = 1 << 60
"""Of steps, ranks and bytes."""


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a checkpoint.

    Args:
        step: PPO steps done.
        world_size: ranks that wrote it.
        roles: by role, its layout and its model's shape (``describe_model``).
        metrics: the step's metrics.
        files: by path relative to the folder.
        version: mppo's version.
        format: of the folder; readers refuse newer ones.
    """

    step: int
    world_size: int
    roles: Mapping[str, Mapping[str, Any]]
    metrics: Mapping[str, float]
    files: Mapping[str, FileEntry]
    version: str
    format: int = FORMAT


def final_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"global_step_{step}"


def partial_checkpoint(root: Path, step: int) -> Path:
    """Where it is built."""
    return root / f".global_step_{step}.partial"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name, None for other names."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def list_checkpoints(root: Path) -> list[Path]:
    """Folders named as checkpoints, newest step first."""
    if not root.is_dir():
        return []
    found = [(step, p) for p in root.iterdir() if (step := step_of(p)) is not None and p.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest; the last file of a checkpoint."""
    write_bytes(folder / MANIFEST, f"{json.dumps(asdict(manifest), indent=1)}\n".encode())


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest.

    Raises:
        Damaged: it is missing or not readable.
        ValueError: a newer version of mppo wrote it.
    """
    try:
        values = read_json(folder / MANIFEST, nan=True)
        written = values["format"]
        if type(written) is not int:
            raise TypeError(f"format is {written!r}")
    except (ValueError, KeyError, TypeError) as error:
        if not (folder / MANIFEST).exists():
            raise Damaged(f"{folder}: {MANIFEST} is missing") from None
        raise Damaged(f"{folder / MANIFEST}: cannot be read ({error})") from error
    if written > FORMAT:
        raise ValueError(
            f"{folder}: its format {written} is newer than this mppo's ({FORMAT}); it was written "
            f"by mppo {values.get('version')}: use that version or a newer one"
        )
    try:
        files = {name: FileEntry(**entry) for name, entry in values["files"].items()}
        manifest = Manifest(**{**values, "files": files})
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{folder / MANIFEST}: entries are missing ({error})") from error
    if odd := _wrong_entry(manifest):
        raise Damaged(f"{folder / MANIFEST}: {odd} is not what a checkpoint says there")
    return manifest


def _wrong_entry(manifest: Manifest) -> str | None:
    """The first entry of another type or range than this module writes; None: all are right."""
    numbers = (manifest.step, manifest.world_size, *(e.size for e in manifest.files.values()))
    if not all(type(number) is int and 0 <= number < MAX_NUMBER for number in numbers):
        return "a number"
    if not isinstance(manifest.roles, dict) or not all(
        isinstance(role, dict) and isinstance(role.get("model"), dict) and "layout" in role
        for role in manifest.roles.values()
    ):
        return "roles"
    values = manifest.metrics.values() if isinstance(manifest.metrics, dict) else [None]
    return None if all(isinstance(value, int | float) for value in values) else "metrics"


def read_sound(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all what was written.

    Raises:
        Damaged: naming what is not.
        ValueError: a newer version of mppo wrote it.
    """
    manifest = read_manifest(folder)
    disk.check_sizes(folder, manifest.files)
    disk.check_contents(folder, manifest.files)
    return manifest


def publish_checkpoint(building: Path, final: Path) -> None:
    """Give a finished folder its name. What bears the name already is kept beside it."""
    if final.exists():
        set_aside(final)
    flush(building)
    building.rename(final)
    flush(final.parent)


def best_step(metrics_by_step: Mapping[int, Mapping[str, float]], metric: str | None) -> int | None:
    """The step with the highest value of a metric (``-name``: the lowest); the later one if equal.

    Steps that lack the metric do not take part; None where none has it.
    """
    if metric is None:
        return None
    sign, name = (-1.0, metric[1:]) if metric.startswith("-") else (1.0, metric)
    known = [(sign * m[name], step) for step, m in metrics_by_step.items() if name in m]
    finite = [pair for pair in known if pair[0] == pair[0]]
    return max(finite)[1] if finite else None


def expendable(
    metrics_by_step: Mapping[int, Mapping[str, float]], keep: int | None, metric: str | None
) -> Sequence[int]:
    """Steps whose checkpoints may be deleted.

    Args:
        metrics_by_step: every sound checkpoint's metrics.
        keep: how many of the newest stay; None keeps all.
        metric: the best by this stays too.
    """
    if keep is None:
        return []
    best = best_step(metrics_by_step, metric)
    return [step for step in sorted(metrics_by_step)[:-keep] if step != best]

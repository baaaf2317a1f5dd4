"""Checkpoint folders: names, manifests, checksums, and which checkpoints may be deleted.

``<run>/checkpoints/global_step_10/`` holds ``manifest.json`` (written last), ``run.json``, one
Megatron distributed checkpoint per trained role and one random-state file per rank. It is built
under ``.global_step_10.partial`` and renamed when every file is on disk, so a folder with the final
name was complete when it was renamed; the manifest's sizes and checksums show whether it still is.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mppo.safety import disk
from mppo.safety.disk import Damaged, FileEntry, flush, set_aside, write_bytes
from mppo.safety.input_error import InputError
from mppo.safety.input_files import read_json

FORMAT = 1
MANIFEST = "manifest.json"
CHECKSUM = "checksum"
"""Entry of the manifest with the checksum of its other entries."""
_NAME = re.compile(r"global_step_([0-9]+)")
MAX_NUMBER = 1 << 60
"""Upper limit of the step, rank and byte counts in a manifest."""


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a checkpoint: sizes and checksums by path relative to the folder,
    ``describe_model`` by role, and ``format``, whose newer versions readers refuse."""

    step: int
    world_size: int
    roles: Mapping[str, Mapping[str, Any]]
    metrics: Mapping[str, float]
    files: Mapping[str, FileEntry]
    version: str
    format: int = FORMAT


def final_path(root: Path, step: int) -> Path:
    return root / f"global_step_{step}"


def partial_checkpoint(root: Path, step: int) -> Path:
    return root / f".global_step_{step}.partial"


def step_of(folder: Path) -> int | None:
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def list_checkpoints(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    found = [(step, p) for p in root.iterdir() if (step := step_of(p)) is not None and p.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_bytes(folder / MANIFEST, manifest_bytes(asdict(manifest)))


def manifest_bytes(values: Mapping[str, Any]) -> bytes:
    """The file of a manifest's values, with a checksum of them in the place of any they have."""
    plain = json.loads(json.dumps({**values, CHECKSUM: None}))
    del plain[CHECKSUM]
    return f"{json.dumps({**plain, CHECKSUM: _checksum(plain)}, indent=1)}\n".encode()


def _checksum(values: Mapping[str, Any]) -> int:
    """CRC-32 of a manifest's values, whatever their order and spacing in the file."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest.

    Raises:
        Damaged: it is missing or cannot be read, its checksum differs (older manifests have none),
            or its step is not that of the folder's name.
        InputError: it has a newer format.
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
        raise InputError(
            f"{folder}: its format {written} is newer than {FORMAT}, the newest that this version "
            f"of mppo reads; use mppo {values.get('version')}, which wrote it, or a newer version"
        )
    saved = values.pop(CHECKSUM, None)
    if saved is not None and saved != _checksum(values):
        raise Damaged(f"{folder / MANIFEST}: its checksum differs from the one that was written")
    try:
        files = {name: FileEntry(**entry) for name, entry in values["files"].items()}
        manifest = Manifest(**{**values, "files": files})
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{folder / MANIFEST}: entries are missing ({error})") from error
    if odd := _wrong_entry(manifest):
        raise Damaged(f"{folder / MANIFEST}: {odd}: wrong type or out of range")
    named = step_of(folder)
    if named is not None and named != manifest.step:
        raise Damaged(
            f"{folder / MANIFEST}: is of step {manifest.step}, the folder's name of step {named}"
        )
    return manifest


def _wrong_entry(manifest: Manifest) -> str | None:
    numbers = (manifest.step, manifest.world_size, *(e.size for e in manifest.files.values()))
    if not all(type(number) is int and 0 <= number < MAX_NUMBER for number in numbers):
        return "step, world_size or a size in files"
    if not isinstance(manifest.roles, dict) or not all(
        isinstance(role, dict) and isinstance(role.get("model"), dict) and "layout" in role
        for role in manifest.roles.values()
    ):
        return "roles"
    values = manifest.metrics.values() if isinstance(manifest.metrics, dict) else [None]
    return None if all(isinstance(value, int | float) for value in values) else "metrics"


def read_verified(folder: Path) -> Manifest:
    """Compare all files with the manifest; raises as ``read_manifest``, or Damaged for a file."""
    manifest = read_manifest(folder)
    disk.check_sizes(folder, manifest.files)
    disk.check_contents(folder, manifest.files)
    return manifest


def publish_checkpoint(building: Path, final: Path) -> None:
    """Rename a complete folder to its final name. An existing folder is renamed, not deleted."""
    if final.exists():
        set_aside(final)
    flush(building)
    building.rename(final)
    flush(final.parent)


def best_step(metrics_by_step: Mapping[int, Mapping[str, float]], metric: str | None) -> int | None:
    """The step with the highest value of a metric (``-name``: the lowest); the later one if equal.
    Steps without the metric, or with a NaN, are ignored."""
    if metric is None:
        return None
    sign, name = (-1.0, metric[1:]) if metric.startswith("-") else (1.0, metric)
    known = [(sign * m[name], step) for step, m in metrics_by_step.items() if name in m]
    finite = [pair for pair in known if pair[0] == pair[0]]
    return max(finite)[1] if finite else None


def expendable(
    metrics_by_step: Mapping[int, Mapping[str, float]], keep: int | None, metric: str | None
) -> Sequence[int]:
    """List the steps of verified checkpoints that may be deleted: neither among the ``keep`` newest
    (None keeps all) nor best by the metric."""
    if keep is None:
        return []
    best = best_step(metrics_by_step, metric)
    return [step for step in sorted(metrics_by_step)[:-keep] if step != best]

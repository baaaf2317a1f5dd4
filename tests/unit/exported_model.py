"""A folder with a model as mppo exports it."""

from __future__ import annotations

from pathlib import Path

from mppo.safety import disk


def exported(folder: Path, text: bytes = b"weights") -> Path:
    """Write a folder like an exported model."""
    folder.mkdir(parents=True)
    entry = disk.write_bytes(folder / "model.safetensors", text)
    disk.write_marker(folder, {"model.safetensors": entry})
    return folder

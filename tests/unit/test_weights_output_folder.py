"""Exporting a model: when an existing folder is replaced and when it is renamed."""

from __future__ import annotations

import json
import os
from pathlib import Path

from exported_model import exported


def test_an_export_replaces_what_mppo_wrote_and_renames_anything_else(tmp_path):
    from mppo.weights.hf.output_folder import partial_path, publish

    actor = tmp_path / "actor"

    def publish_new(text: bytes) -> Path | None:
        exported(partial_path(actor), text)
        return publish(actor)

    assert publish_new(b"first") is None
    assert publish_new(b"second") is None
    assert [path.name for path in tmp_path.iterdir()] == ["actor"]
    (actor / "notes.txt").write_text("of the user")
    assert publish_new(b"third") == tmp_path / "actor.old-1"
    assert (tmp_path / "actor.old-1/notes.txt").read_text() == "of the user"
    (actor / "model.safetensors").write_bytes(b"merged by the user")
    assert publish_new(b"fourth") == tmp_path / "actor.old-2"
    (actor / "model.safetensors").write_bytes(b"ofuser")  # of the same length
    later = (actor / ".mppo.json").stat().st_mtime + 1
    os.utime(actor / "model.safetensors", (later, later))  # clocks of file systems are coarse
    assert publish_new(b"fifth!") == tmp_path / "actor.old-3"
    assert (tmp_path / "actor.old-3/model.safetensors").read_bytes() == b"ofuser"
    assert json.loads((actor / ".mppo.json").read_text())["files"]["model.safetensors"]["size"] == 6

"""Checkpoint folders: manifests, damage, names, and pruning."""

from __future__ import annotations

import json
import zlib

import pytest

from mppo.checkpoint import folder as folders
from mppo.checkpoint.folder import Manifest
from mppo.checkpoint.pruning import Pruner
from mppo.recipe.sections.trainer import TrainerConfig
from mppo.safety import disk
from mppo.safety.disk import Damaged, FileEntry


def make(root, step: int, metrics=None):
    path = folders.final_path(root, step)
    (path / "actor").mkdir(parents=True)
    files = {
        name: disk.write_bytes(path / name, content)
        for name, content in {"run.json": b"{}", "actor/a.distcp": b"\0" * 100 + b"weights"}.items()
    }
    folders.write_manifest(path, Manifest(step, 2, {}, metrics or {}, files, "0.1"))
    return path


def test_a_complete_checkpoint_is_valid(tmp_path):
    manifest = folders.read_verified(make(tmp_path, 7, {"reward": 0.5}))
    assert (manifest.step, manifest.metrics) == (7, {"reward": 0.5})
    assert manifest.files["run.json"] == FileEntry(2, zlib.crc32(b"{}"))


def truncate(path):
    file = path / "actor/a.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def flip(path):
    file = path / "actor/a.distcp"
    data = bytearray(file.read_bytes())
    data[50] ^= 1
    file.write_bytes(data)


def change_step(path):
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"step": 7', '"step": 6'))


def change_checksum(path):
    file = path / "manifest.json"
    file.write_text(file.read_text().replace("checksum", "checksun"))


DAMAGE = {
    "changed digit": (change_step, "manifest.json: its checksum differs"),
    "changed name of the checksum": (change_checksum, "entries are missing"),
    "another step's folder": (
        lambda p: p.rename(p.with_name("other")) and make(p.parent, 6).rename(p),
        "is of step 6, the folder's name of step 7",
    ),
    "truncated shard": (truncate, "has 106 bytes, but 107 were written"),
    "flipped bit": (flip, "its checksum differs from the one that was written"),
    "missing file": (lambda p: (p / "actor/a.distcp").unlink(), "a.distcp: is missing"),
    "missing manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "cut manifest": (lambda p: (p / "manifest.json").write_text('{"form'), "cannot be read"),
    "empty manifest": (lambda p: (p / "manifest.json").write_text('{"format": 1}'), "missing"),
    "manifest of a list": (lambda p: (p / "manifest.json").write_text("[]"), "cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_named(tmp_path, name):
    path = make(tmp_path, 7)
    harm, message = DAMAGE[name]
    harm(path)
    with pytest.raises(Damaged, match=message):
        folders.read_verified(path)


def test_a_manifest_of_an_older_version_has_no_checksum(tmp_path):
    path = make(tmp_path, 7, {"reward": float("nan"), "rate": 1e-7, "zero": -0.0})
    written = folders.read_manifest(path)
    values = json.loads((path / "manifest.json").read_text())
    assert values.pop("checksum")
    (path / "manifest.json").write_text(json.dumps(values))
    assert str(folders.read_manifest(path)) == str(written)


def test_a_manifest_may_be_formatted_again(tmp_path):
    path = make(tmp_path, 7, {"reward": float("nan"), "rate": 1e-7})
    values = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(dict(reversed(values.items()))))
    assert folders.read_manifest(path).step == 7


def test_a_newer_format_is_no_damage_but_a_refusal(tmp_path):
    path = make(tmp_path, 7)
    values = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**values, "format": 2, "version": "9.9"}))
    with pytest.raises(ValueError, match=r"format 2 is newer.*mppo 9\.9") as caught:
        folders.read_manifest(path)
    assert not isinstance(caught.value, Damaged)


def test_shares_of_the_checking_cover_every_file(tmp_path):
    path = make(tmp_path, 7)
    flip(path)
    manifest = folders.read_manifest(path)
    found = 0
    for share in range(3):
        try:
            disk.check_contents(path, manifest.files, share, 3)
        except Damaged:
            found += 1
    assert found == 1


def test_only_final_names_are_listed_newest_first(tmp_path):
    for step in (2, 10, 9):
        make(tmp_path, step)
    (tmp_path / ".global_step_11.partial").mkdir()
    (tmp_path / "global_step_12.old-1").mkdir()
    (tmp_path / "global_step_x").mkdir()
    (tmp_path / "global_step_13").write_text("a file")
    assert [folders.step_of(p) for p in folders.list_checkpoints(tmp_path)] == [10, 9, 2]
    assert folders.list_checkpoints(tmp_path / "absent") == []


def test_publishing_never_overwrites(tmp_path):
    old = make(tmp_path, 7)
    building = folders.partial_checkpoint(tmp_path, 7)
    building.mkdir()
    (building / "new").write_text("new")
    folders.publish_checkpoint(building, folders.final_path(tmp_path, 7))
    assert (old / "new").exists()
    folders.read_verified(tmp_path / "global_step_7.old-1")


BY_STEP = {1: {"r": 0.1}, 2: {"r": 0.9}, 3: {}, 4: {"r": 0.2}, 5: {"r": float("nan")}}


@pytest.mark.parametrize(
    ("keep", "metric", "goes"),
    [
        (None, "r", []),
        (2, None, [1, 2, 3]),
        (2, "r", [1, 3]),
        (2, "-r", [2, 3]),
        (5, "r", []),
        (9, None, []),
        (1, "unknown", [1, 2, 3, 4]),
    ],
)
def test_the_newest_and_the_best_stay(keep, metric, goes):
    assert list(folders.expendable(BY_STEP, keep, metric)) == goes


def test_the_later_of_two_equally_good_ones_is_the_best():
    assert folders.best_step({1: {"r": 1.0}, 2: {"r": 1.0}}, "r") == 2


def test_only_valid_checkpoints_count_in_max_ckpt_to_keep(tmp_path):
    said: list[str] = []
    for step in (1, 2, 3, 5):
        make(tmp_path, step)
    flip(tmp_path / "global_step_5")
    trainer = TrainerConfig(max_ckpt_to_keep=1)
    pruner = Pruner(trainer, tmp_path, said.append)
    pruner.published(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_3", "global_step_5"]
    make(tmp_path, 4)
    pruner.published(4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_4", "global_step_5"]
    assert len([line for line in said if "neither counted nor deleted" in line]) == 1


def test_the_best_checkpoint_is_linked_and_kept_also_by_a_later_start(tmp_path):
    said: list[str] = []
    trainer = TrainerConfig(max_ckpt_to_keep=1, best_metric="-val/loss")
    for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
        make(tmp_path, step, {"val/loss": loss})
        # every save is by a new process, as after a resume
        Pruner(trainer, tmp_path, said.append).published(step)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best", "global_step_2", "global_step_3",
    ]  # fmt: skip
    assert (tmp_path / "best").readlink().name == "global_step_2"
    assert folders.read_verified(tmp_path / "best").step == 2
    assert said[-1] == f"best checkpoint: {tmp_path / 'global_step_2'} (val/loss = 0.25)"
    make(tmp_path, 4, {"val/loss": 0.125})
    Pruner(trainer, tmp_path, said.append).published(4)
    assert (tmp_path / "best").readlink().name == "global_step_4"
    assert [folders.step_of(path) for path in folders.list_checkpoints(tmp_path)] == [4]


def test_a_metric_that_no_checkpoint_has_is_reported_once_and_no_folder_is_replaced(tmp_path):
    said: list[str] = []
    pruner = Pruner(TrainerConfig(best_metric="val/reward"), tmp_path, said.append)
    for step in (1, 2):
        make(tmp_path, step, {"val/rewards": 1.0})
        pruner.published(step)
    assert said == [
        "trainer.best_metric = val/reward: no checkpoint has this metric; did you mean val/rewards?"
    ]
    (tmp_path / "best").mkdir()
    make(tmp_path, 3, {"val/reward": 1.0})
    pruner.published(3)
    assert (tmp_path / "best").is_dir()
    assert not (tmp_path / "best").is_symlink()
    assert said[-1].endswith(
        f"global_step_3 (val/reward = 1); {tmp_path / 'best'} exists and is not a link"
    )

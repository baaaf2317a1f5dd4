"""Which checkpoint a run takes up when some are damaged, and what it leaves when it cannot save."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from layout_case import Case, build_role, run_cases
from test_checkpoint_layouts import checkpointer, train

SMALL_DISK_MB = 1


@dataclass(frozen=True)
class Told:
    """What ``resume`` did: the step it took up, or what it refused with; and what it said."""

    step: int | None
    refusal: str
    said: list[str]
    folders: list[str]


def told(role, root: Path, **trainer) -> Told:
    from mppo.config.errors import ConfigError

    said: list[str] = []
    step, refusal = None, ""
    try:
        step = checkpointer(role, root, said, **trainer).resume()
    except ConfigError as error:
        refusal = str(error)
    folders = sorted(path.name for path in root.parent.glob("**/global_step_*"))
    return Told(step, refusal, said, folders)


def shard(folder: Path) -> Path:
    return sorted((folder / "actor").glob("*.distcp"))[0]


def flip(folder: Path) -> None:
    data = bytearray(shard(folder).read_bytes())
    data[len(data) // 2] ^= 16
    shard(folder).write_bytes(data)


def cut(folder: Path) -> None:
    os.truncate(shard(folder), 100)


def newer(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))


def other_model(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["roles"]["actor"]["model"]["hidden_size"] = 64
    (folder / "manifest.json").write_text(json.dumps(manifest))


HARM = {
    "flipped bit": flip,
    "truncated shard": cut,
    "missing shard": lambda folder: shard(folder).unlink(),
    "missing metadata": lambda folder: (folder / "actor/.metadata").unlink(),
    "missing manifest": lambda folder: (folder / "manifest.json").unlink(),
    "missing run state": lambda folder: (folder / "run.json").unlink(),
    "newer format": newer,
    "other model": other_model,
}


def damaged(case: Case, folder: Path, registry) -> dict[str, Told]:
    """Two checkpoints each time, the newer one harmed."""
    role = build_role(case, folder, registry)
    outcomes = {}
    for name, harm in HARM.items():
        root = folder / name / "checkpoints"
        for step in (1, 2):
            checkpointer(role, root, []).save(step, {})
        harm(root / "global_step_2")
        outcomes[name] = told(role, root)
    root = folder / "flipped bit/checkpoints"
    explicit = str(root / "global_step_2")
    outcomes["explicit"] = told(role, root, resume_mode="resume_path", resume_from_path=explicit)
    flip(root / "global_step_1")
    outcomes["all"] = told(role, root)
    outcomes["disable"] = told(role, root, resume_mode="disable")
    outcomes["none"] = told(role, folder / "empty/checkpoints")
    outcomes["time limit"] = after_step(role, folder / "limit", checkpoint_must_save_by="00:00:01")
    outcomes["minutes"] = after_step(role, folder / "minutes", save_every_minutes=1e-9)
    outcomes["unscheduled"] = after_step(role, folder / "unscheduled")
    with locked(folder / "locked"), locked(folder / "locked") as outcomes["second job"]:
        pass
    with locked(folder / "locked") as outcomes["later job"]:
        pass
    (folder / "file").touch()
    with locked(folder / "file/run") as outcomes["no folder"]:
        pass
    return outcomes


def after_step(role, run_dir: Path, **trainer) -> Told:
    """Whether a run stops after its third step, and what it has saved."""
    said: list[str] = []
    saver = checkpointer(role, run_dir / "checkpoints", said, **trainer)
    stops = saver.after_step(3, last=False, metrics={})
    saver.finish()
    return Told(int(stops), "", said, sorted(path.name for path in run_dir.glob("*/global_step_*")))


@contextmanager
def locked(run_dir: Path) -> Iterator[Told]:
    """What a job is told that wants a run's folder."""
    from mppo.checkpoint.lock import only_job_in
    from mppo.config.errors import ConfigError

    said: list[str] = []
    try:
        with only_job_in(run_dir, said.append, patience_s=0.0):
            yield Told(0, "", said, [])
    except ConfigError as error:
        yield Told(None, str(error), said, [])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, Told]:
    return run_cases([Case("qwen2")], 1, tmp_path_factory.mktemp("damage"), damaged)[0]


NAMED = {
    "flipped bit": "its checksum is not the one that was written",
    "truncated shard": "has 100 bytes",
    "missing shard": ".distcp: is missing",
    "missing metadata": "actor/.metadata: is missing",
    "missing manifest": "manifest.json is missing",
    "missing run state": "run.json: is missing",
}


@pytest.mark.parametrize("name", NAMED)
def test_the_checkpoint_before_a_damaged_one_is_taken_and_the_file_named(outcomes, name):
    outcome = outcomes[name]
    assert outcome.step == 1
    assert outcome.said[0].startswith("damaged checkpoint passed over: ")
    assert NAMED[name] in outcome.said[0]
    assert outcome.folders == ["global_step_1", "global_step_2"], "the damaged one is left alone"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("newer format", "its format 99 is newer than this mppo's"),
        ("other model", "holds another model as actor: hidden_size 64 there, 32 here"),
        ("explicit", "none of its 1 checkpoints is whole"),
        ("all", "none of its 2 checkpoints is whole"),
    ],
)
def test_it_refuses_rather_than_lose_progress(outcomes, name, message):
    assert outcomes[name].step is None
    assert message in outcomes[name].refusal
    assert "resume_mode=disable" in outcomes[name].refusal


def test_starting_anew_moves_checkpoints_aside(outcomes):
    assert outcomes["disable"].step == 0
    assert "checkpoints.old-1" in outcomes["disable"].said[0]
    assert outcomes["disable"].folders == ["global_step_1", "global_step_2"]


def test_without_checkpoints_it_starts_at_the_beginning(outcomes):
    assert outcomes["none"] == Told(0, "", [], [])


def test_it_saves_and_stops_before_a_known_limit(outcomes):
    assert outcomes["time limit"].step == 1
    assert outcomes["time limit"].folders == ["global_step_3"]
    assert "checkpoint_must_save_by leaves no time" in outcomes["time limit"].said[0]


def test_it_saves_by_the_clock_and_goes_on(outcomes):
    assert outcomes["minutes"].step == 0
    assert outcomes["minutes"].folders == ["global_step_3"]
    assert outcomes["unscheduled"].folders == []


def test_one_folder_is_for_one_job(outcomes):
    second = outcomes["second job"].refusal
    assert "trainer.default_local_dir" in second
    assert "another job runs there: pid " in second
    assert "use another folder" in second
    assert outcomes["later job"] == Told(0, "", [], [])


def test_a_folder_that_cannot_be_made_is_refused(outcomes):
    assert "cannot be written (Not a directory)" in outcomes["no folder"].refusal


@contextmanager
def small_disk(folder: Path):
    """A file system of ``SMALL_DISK_MB`` at ``folder``."""
    folder.mkdir()
    size = f"size={SMALL_DISK_MB}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def can_mount(folder: Path) -> bool:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        return False
    subprocess.run(["umount", folder], check=True)
    return True


def full(case: Case, folder: Path, registry) -> dict[str, object]:
    """Save until the disk is full, by turns waiting and in the background."""
    from mppo.checkpoint.writer import SaveError

    role, said = build_role(case, folder, registry), []
    with small_disk(folder / "disk"):
        root = folder / "disk/checkpoints"
        saver = checkpointer(role, root, said, async_save=True)
        step = 0
        while saver.failed_saves == 0 and step < 50:
            step += 1
            saver.save(step, {})
            saver._collect(saver._thread.wait())
        try:
            saver.finish()
            ended = ""
        except SaveError as error:
            ended = str(error)
        left = sorted(path.name for path in root.iterdir())
        taken = checkpointer(role, root, []).resume()
        subprocess.run(["mount", "-o", "remount,ro", folder / "disk"], check=True)
        read_only: list[str] = []
        checkpointer(role, root, read_only).save(99, {})
        anew = told(role, root, resume_mode="disable")
        still = sorted(path.name for path in root.iterdir())
    return {
        "step": step,
        "said": said,
        "ended": ended,
        "left": left,
        "taken": taken,
        "read only": read_only,
        "anew": anew.refusal,
        "still": still,
    }


@pytest.fixture(scope="module")
def on_small_disk(tmp_path_factory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("disk")
    if not can_mount(folder / "try"):
        pytest.skip("mounting a small tmpfs needs root and CAP_SYS_ADMIN")
    return run_cases([Case("qwen2")], 1, folder, full)[0]


def test_a_read_only_disk_is_said_and_left_as_it_is(on_small_disk):
    assert "global_step_99 could not be written: Read-only" in on_small_disk["read only"][-1]
    assert "cannot be moved aside (Read-only file system)" in on_small_disk["anew"]
    assert "trainer.resume_mode" in on_small_disk["anew"]
    assert on_small_disk["still"] == on_small_disk["left"]


def test_a_full_disk_harms_no_earlier_checkpoint(on_small_disk):
    outcome = on_small_disk
    whole = outcome["step"] - 1
    assert whole >= 1
    assert outcome["taken"] == whole
    assert outcome["left"] == sorted(f"global_step_{step + 1}" for step in range(whole))
    assert "could not be written: " in outcome["said"][-1]
    assert "No space left on device" in outcome["said"][-1]
    assert outcome["ended"].startswith("the last checkpoint could not be written")


def background(case: Case, folder: Path, registry) -> dict[str, object]:
    """An asynchronous save while training goes on holds the weights of its moment; pruning."""
    role, said = build_role(case, folder, registry), []
    root = folder / "background"
    trainer = {"async_save": True, "max_ckpt_to_keep": 2, "best_metric": "reward"}
    saver = checkpointer(role, root, said, **trainer)
    before = {}
    for step in range(1, 6):
        train(role, 1)
        before[step] = [t.clone() for b in role.hf_weights(1 << 16) for _, t in b]
        saver.save(step, {"reward": 1.0 if step == 2 else 0.0})
        saver.before_update()
        train(role, 1)
    saver.finish()
    left = sorted(path.name for path in root.iterdir())
    checkpointer(role, root, []).resume()
    now = [t.clone() for b in role.hf_weights(1 << 16) for _, t in b]
    return {"left": left, "same": all((a == b).all() for a, b in zip(now, before[5])), "said": said}


def test_an_asynchronous_save_is_of_its_moment_and_old_ones_go(tmp_path):
    layout = {"tensor_model_parallel_size": 2}
    (outcome,) = run_cases([Case("qwen2", layout)], 2, tmp_path, background)
    assert outcome["same"]
    assert outcome["left"] == ["global_step_2", "global_step_4", "global_step_5"]
    assert len([line for line in outcome["said"] if line.startswith("saved ")]) == 5

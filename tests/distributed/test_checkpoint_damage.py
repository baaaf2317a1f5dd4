"""Which checkpoint a run resumes from when some are damaged, and what a failed save leaves."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from layout_case import Case, build_role, run_cases
from malicious_pickle import add_malicious_pickle
from test_checkpoint_layouts import checkpointer, resume, train

from mppo.checkpoint.folder import manifest_bytes

SMALL_DISK_MB = 1


@dataclass(frozen=True)
class ResumeResult:
    """The result of ``resume``: the step or the refusal, and its messages."""

    step: int | None
    refusal: str
    said: list[str]
    folders: list[str]


def reported(role, root: Path, **trainer) -> ResumeResult:
    from mppo.recipe.errors import ConfigError

    said: list[str] = []
    step, refusal = None, ""
    try:
        step = resume(role, root, said, **trainer)
    except ConfigError as error:
        refusal = str(error)
    folders = sorted(path.name for path in root.parent.glob("**/*global_step_*"))
    return ResumeResult(step, refusal, said, folders)


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


def changed_digit(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"step": 2', '"step": 1'))


def other_model(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["roles"]["actor"]["model"]["hidden_size"] = 64
    (folder / "manifest.json").write_bytes(manifest_bytes(manifest))


HARM = {
    "flipped bit": flip,
    "truncated shard": cut,
    "missing shard": lambda folder: shard(folder).unlink(),
    "missing metadata": lambda folder: (folder / "actor/.metadata").unlink(),
    "missing manifest": lambda folder: (folder / "manifest.json").unlink(),
    "missing run state": lambda folder: (folder / "run.json").unlink(),
    "changed digit": changed_digit,
    "newer format": newer,
    "other model": other_model,
    "being written": lambda folder: folder.rename(folder.with_name(f".{folder.name}.partial")),
}


def stranger(folder: Path) -> dict[str, str]:
    """A copy with code in its table of contents, whose checksums are right; keys to resume it."""
    from mppo.safety.disk import file_checksum

    copy = folder.parents[2] / "elsewhere" / folder.name
    shutil.copytree(folder, copy)
    table = copy / "actor/.metadata"
    add_malicious_pickle(table, folder.with_name("global_step_9"))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"]["actor/.metadata"] = asdict(file_checksum(table))
    (copy / "manifest.json").write_bytes(manifest_bytes(manifest))
    return {"resume_mode": "resume_path", "resume_from_path": str(copy)}


def damaged(case: Case, folder: Path, registry) -> dict[str, ResumeResult]:
    """Two checkpoints each time, the newer one harmed."""
    role = build_role(case, folder, registry)
    outcomes = {}
    for name, harm in HARM.items():
        root = folder / name / "checkpoints"
        for step in (1, 2):
            checkpointer(role, root, []).save(step, {})
        harm(root / "global_step_2")
        outcomes[name] = reported(role, root)
    root = folder / "flipped bit/checkpoints"
    explicit = str(root / "global_step_2")
    outcomes["explicit"] = reported(
        role, root, resume_mode="resume_path", resume_from_path=explicit
    )
    outcomes["stranger"] = reported(role, root, **stranger(root / "global_step_1"))
    flip(root / "global_step_1")
    outcomes["all"] = reported(role, root)
    outcomes["none"] = reported(role, folder / "empty/checkpoints")
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        restarted = folder / "missing manifest/checkpoints"
        os.environ[name] = "1"
        outcomes[name] = reported(role, restarted, resume_mode="disable")
        del os.environ[name]
    outcomes["time limit"] = after_step(role, folder / "limit", checkpoint_must_save_by="00:00:01")
    outcomes["minutes"] = after_step(role, folder / "minutes", save_every_minutes=1e-9)
    outcomes["unscheduled"] = after_step(role, folder / "unscheduled")
    outcomes["asked"] = after_step(role, folder / "asked", requested=True)
    unsaved = {"requested": True, "save_on_signal": False}
    outcomes["asked not to save"] = after_step(role, folder / "unsaved", **unsaved)
    with locked(folder / "locked"), locked(folder / "locked") as outcomes["second job"]:
        pass
    with locked(folder / "locked") as outcomes["later job"]:
        pass
    (folder / "file").touch()
    with locked(folder / "file/run") as outcomes["no folder"]:
        pass
    return outcomes


def after_step(role, run_dir: Path, requested: bool = False, **trainer) -> ResumeResult:
    """Whether a run stops after its third step, and the saved steps."""
    said: list[str] = []
    saver = checkpointer(role, run_dir / "checkpoints", said, **trainer)
    saver._stop.signal_name = "SIGUSR1" if requested else None
    stops = saver.after_step(3, last=False, metrics={})
    saver.finish()
    return ResumeResult(
        int(stops), "", said, sorted(path.name for path in run_dir.glob("*/global_step_*"))
    )


@contextmanager
def locked(run_dir: Path) -> Iterator[ResumeResult]:
    """The message to a second job in a run's folder."""
    from mppo.checkpoint.lock import run_folder_lock
    from mppo.recipe.errors import ConfigError

    said: list[str] = []
    try:
        with run_folder_lock(run_dir, said.append, patience_s=0.0):
            yield ResumeResult(0, "", said, [])
    except ConfigError as error:
        yield ResumeResult(None, str(error), said, [])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, ResumeResult]:
    return run_cases([Case("qwen2")], 1, tmp_path_factory.mktemp("damage"), damaged)[0]


NAMED = {
    "flipped bit": "its checksum differs from the one that was written",
    "truncated shard": "has 100 bytes",
    "missing shard": ".distcp: is missing",
    "missing metadata": "actor/.metadata: is missing",
    "missing manifest": "manifest.json is missing",
    "missing run state": "run.json: is missing",
    "changed digit": "manifest.json: its checksum differs from the one that was written",
}


@pytest.mark.parametrize("name", NAMED)
def test_a_run_resumes_before_a_damaged_checkpoint_and_names_the_file(outcomes, name):
    outcome = outcomes[name]
    assert outcome.step == 1
    assert outcome.said[0].startswith("damaged checkpoint skipped: ")
    assert NAMED[name] in outcome.said[0]
    assert outcome.folders == ["global_step_1", "global_step_2"], "the damaged one is left alone"


def test_an_unfinished_checkpoint_is_ignored(outcomes):
    outcome = outcomes["being written"]
    assert outcome.step == 1
    assert not any("damaged" in line for line in outcome.said)
    assert outcome.folders == [".global_step_2.partial", "global_step_1"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("newer format", "its format 99 is newer than 1, the newest"),
        ("other model", "holds another model as actor: hidden_size is 64 there, 32 here"),
        ("explicit", "none of its 1 checkpoints is intact"),
        ("all", "none of its 2 checkpoints is intact"),
    ],
)
def test_a_resume_is_refused_rather_than_lose_progress(outcomes, name, message):
    assert outcomes[name].step is None
    assert message in outcomes[name].refusal
    assert "resume_mode=disable" in outcomes[name].refusal


def test_a_checkpoint_from_elsewhere_that_would_run_code_is_refused(outcomes):
    stranger = outcomes["stranger"]
    assert stranger.step is None
    assert "trainer.resume_from_path" in stranger.refusal
    assert "actor/.metadata: holds more than a checkpoint's metadata" in stranger.refusal
    assert "it names posix.mkdir" in stranger.refusal
    assert stranger.folders == ["global_step_1", "global_step_2"], "and nothing was run"


def test_without_checkpoints_a_run_starts_at_the_beginning(outcomes):
    assert outcomes["none"] == ResumeResult(0, "", [], [])


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_restarted_job_resumes_whatever_resume_mode_says(outcomes, name):
    assert outcomes[name].step == 1
    assert outcomes[name].folders == ["global_step_1", "global_step_2"]


def test_a_stop_request_saves_unless_save_on_signal_is_false(outcomes):
    assert outcomes["asked"].step == outcomes["asked not to save"].step == 1
    assert outcomes["asked"].folders == ["global_step_3"]
    assert outcomes["asked not to save"].folders == []


def test_a_run_saves_and_stops_before_checkpoint_must_save_by(outcomes):
    assert outcomes["time limit"].step == 1
    assert outcomes["time limit"].folders == ["global_step_3"]
    assert "checkpoint_must_save_by leaves no time" in outcomes["time limit"].said[0]


def test_a_run_saves_every_few_minutes_and_continues(outcomes):
    assert outcomes["minutes"].step == 0
    assert outcomes["minutes"].folders == ["global_step_3"]
    assert outcomes["unscheduled"].folders == []


def test_a_second_job_in_a_run_folder_is_refused(outcomes):
    second = outcomes["second job"].refusal
    assert "trainer.default_local_dir" in second
    assert "another job is using the folder: pid " in second
    assert "use another folder" in second
    assert outcomes["later job"] == ResumeResult(0, "", [], [])


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
        taken = resume(role, root, [])
        subprocess.run(["mount", "-o", "remount,ro", folder / "disk"], check=True)
        read_only: list[str] = []
        checkpointer(role, root, read_only).save(99, {})
        still = sorted(path.name for path in root.iterdir())
    return {
        "step": step,
        "said": said,
        "ended": ended,
        "left": left,
        "taken": taken,
        "read only": read_only,
        "still": still,
    }


@pytest.fixture(scope="module")
def on_small_disk(tmp_path_factory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("disk")
    if not can_mount(folder / "try"):
        pytest.skip("mounting a small tmpfs needs root and CAP_SYS_ADMIN")
    return run_cases([Case("qwen2")], 1, folder, full)[0]


def test_a_read_only_disk_is_reported_and_not_changed(on_small_disk):
    assert "global_step_99 could not be written: Read-only" in on_small_disk["read only"][-1]
    assert on_small_disk["still"] == on_small_disk["left"]


def test_a_full_disk_does_not_damage_earlier_checkpoints(on_small_disk):
    outcome = on_small_disk
    complete = outcome["step"] - 1
    assert complete >= 1
    assert outcome["taken"] == complete
    assert outcome["left"] == sorted(f"global_step_{step + 1}" for step in range(complete))
    assert "could not be written: " in outcome["said"][-1]
    assert "No space left on device" in outcome["said"][-1]
    assert outcome["ended"].startswith("the last checkpoint could not be written")


def draws(role) -> tuple[float, ...]:
    """A number from each source of random ones."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with role.groups.active(), get_cuda_rng_tracker().fork():
        tracked = torch.rand(()).item()
    return random.random(), np.random.random(), torch.rand(()).item(), tracked


def background(case: Case, folder: Path, registry) -> dict[str, object]:
    """An asynchronous save during training stores the weights at its start; pruning."""
    from delayed_save import delay_copies

    role, said = build_role(case, folder, registry), []
    root = folder / "background"
    trainer = {"async_save": True, "max_ckpt_to_keep": 2, "best_metric": "reward"}
    saver = checkpointer(role, root, said, **trainer)
    changed, before, meanwhile = delay_copies(saver), {}, []
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(dist.get_rank())
    for step in range(1, 6):
        train(role, 1)
        before[step] = [t.clone() for b in role.weights.stream(1 << 16) for _, t in b]
        saver.save(step, {"reward": 1.0 if step == 2 else 0.0})
        meanwhile.append(saver._thread.busy)
        drawn = draws(role)
        saver.before_update()
        train(role, 1)
        changed.set()
    saver.finish()
    left = sorted(path.name for path in root.iterdir())
    resume(role, root, [])
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (drawn, draws(role)))
    now = [t.clone() for b in role.weights.stream(1 << 16) for _, t in b]
    same = all((a == b).all() for a, b in zip(now, before[5]))
    return {"left": left, "same": same, "said": said, "meanwhile": meanwhile, "draws": everyone}


def test_an_asynchronous_save_is_a_snapshot_and_old_ones_are_removed(tmp_path):
    layout = {"tensor_model_parallel_size": 2}
    (outcome,) = run_cases([Case("qwen2", layout)], 2, tmp_path, background)
    assert outcome["meanwhile"] == [True] * 5, "a save that has not copied yet returns"
    assert outcome["same"]
    assert outcome["left"] == ["best", "global_step_2", "global_step_4", "global_step_5"]
    assert len([line for line in outcome["said"] if line.startswith("saved ")]) == 5
    (mine, mine_again), (other, other_again) = outcome["draws"]
    assert mine == mine_again, "what comes after the save comes after the resume"
    assert other == other_again
    assert all(a != b for a, b in zip(mine, other)), "each rank takes up its own state"

"""A start in an existing run folder: its decision, and that nothing is lost."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml
from exported_model import exported
from test_checkpoint_folder import flip, make

from mppo.recipe.errors import ConfigError
from mppo.recipe.load import load_recipe
from mppo.recipe.sections.trainer import TrainerConfig
from mppo.report.run_record import Status, write_status
from mppo.safety import disk
from mppo.safety.redact import redact
from mppo.trainer.run_folder import Earlier, RunFolder, check_written, decide

STEPS = 4
NUMBERS = "".join(f'{{"step": {step}, "a": {step}.5}}\n' for step in range(1, STEPS + 1))


@pytest.fixture(autouse=True)
def alone():
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def recipe_of(run: Path, *keys: str):
    return load_recipe(None, [f"trainer.default_local_dir={run}", "data.task=arithmetic", *keys])


def ran(run: Path, *keys: str, checkpoints=(), status: str = "finished", step: int = STEPS) -> Path:
    """The folder of a run of ``STEPS`` steps."""
    run.mkdir()
    (run / "metrics.jsonl").write_text(NUMBERS)
    (run / "samples.jsonl").write_text('{"step": 1, "prompt": "a", "response": "b", "score": 1}\n')
    for name in ("report.md", "reward_kl.png"):
        (run / name).write_text(f"of the earlier run: {name}")
    plain = redact(recipe_of(run, *keys).model_dump(mode="json"))
    (run / "recipe.yaml").write_text(yaml.safe_dump(plain))
    for number in checkpoints:
        make(run / "checkpoints", number)
    if status:
        write_status(run, Status(status, step, STEPS))
    if status == "finished":
        exported(run / "actor")
    return run


def opened(run: Path, *keys: str, said: list[str] | None = None, total: int = STEPS) -> RunFolder:
    say = [].append if said is None else said.append
    return RunFolder(run, recipe_of(run, *keys), total, {}, say)


def contents(folder: Path) -> dict[str, str]:
    """A hash of every file below a folder, by path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def refused(run: Path, *keys: str, **settings) -> str:
    """The message of a refused start; checks that no file has changed."""
    before = contents(run)
    with pytest.raises(ConfigError) as caught:
        opened(run, *keys, **settings)
    assert contents(run) == before
    return str(caught.value)


SET_ASIDE = "set_aside"
DONE = Earlier(finished=STEPS, results=True, exported=True, recipe={})
SAVED = Earlier(steps=(2, 1), results=True, recipe={})
BOTH = Earlier(steps=(4, 2), finished=STEPS, results=True, exported=True, recipe={})
ENDED = Earlier(results=True, recipe={})
FAILED = Earlier(recipe={})


@pytest.mark.parametrize(
    ("earlier", "start", "changed", "on_existing_run", "total", "expected"),
    [
        (Earlier(), "auto", ["x"], "refuse", 4, "new"),
        (FAILED, "auto", ["x"], "refuse", 4, "new"),
        (DONE, "auto", [], "refuse", 4, "finished"),
        (DONE, "auto", [], SET_ASIDE, 3, "finished"),
        (DONE, "auto", [], "refuse", 5, "replace"),
        (DONE, "auto", ["x"], "refuse", 4, None),
        (DONE, "auto", ["x"], SET_ASIDE, 4, "replace"),
        (DONE, "disable", ["x"], "refuse", 4, "replace"),
        (DONE, "other", ["x"], "refuse", 4, None),
        (BOTH, "auto", ["x"], "refuse", 4, "finished"),
        (BOTH, "auto", [], "refuse", 5, "resume"),
        (BOTH, "own", [], "refuse", 4, "resume"),
        (BOTH, "disable", [], "refuse", 4, "replace"),
        (SAVED, "auto", ["x"], "refuse", 4, "resume"),
        (SAVED, "other", [], "refuse", 4, "replace"),
        (ENDED, "auto", [], "refuse", 4, "replace"),
        (ENDED, "auto", ["x"], "refuse", 4, None),
        (ENDED, "auto", ["x"], SET_ASIDE, 4, "replace"),
    ],
)
def test_the_decision_of_a_start(earlier, start, changed, on_existing_run, total, expected):
    trainer = TrainerConfig(on_existing_run=on_existing_run)
    if expected is None:
        with pytest.raises(ConfigError, match=r"of another recipe .* and no checkpoint"):
            decide(earlier, trainer, start, total, changed)
    else:
        assert decide(earlier, trainer, start, total, changed) == expected


def test_other_servers_and_schedules_count_as_the_same_training(tmp_path):
    keys = ["rollout.name=sglang", "rollout.mode=disaggregated", "rollout.urls=[http://a:1]"]
    run = ran(tmp_path / "run", *keys)
    keys[2] = "rollout.urls=[http://b:2]"
    assert opened(run, *keys, "trainer.save_freq=3", "trainer.experiment_name=x").finished
    assert "trainer.seed: 0 -> 1" in refused(run, *keys, "trainer.seed=1")


@pytest.mark.parametrize("name", ["metrics.jsonl", "status.json", "recipe.yaml"])
def test_anything_but_a_file_in_place_of_a_runs_file_is_refused(tmp_path, name):
    run = ran(tmp_path / "run")
    (run / name).unlink()
    os.mkfifo(run / name)  # opening it would block
    assert f"{name} is not a file" in refused(run)


def test_a_finished_run_without_its_export_resumes_from_its_checkpoint():
    earlier = Earlier(steps=(4,), finished=STEPS, results=True, recipe={})
    assert decide(earlier, TrainerConfig(), "auto", STEPS, []) == "resume"
    assert decide(earlier, TrainerConfig(export_hf=False), "auto", STEPS, []) == "finished"


@pytest.mark.parametrize("checkpoints", [(), (2, 4)])
def test_nothing_is_left_to_do_in_a_finished_run(tmp_path, checkpoints):
    run, said = ran(tmp_path / "run", checkpoints=checkpoints), []
    before = contents(run)
    folder = opened(run, said=said)
    assert folder.finished
    assert contents(run) == before
    assert said[0] == f"nothing is left to do: the run in {run} has finished its {STEPS} steps"


def test_a_run_that_finished_before_there_was_a_status_is_known_by_its_report(tmp_path):
    run = ran(tmp_path / "run", status="", checkpoints=(2,))
    exported(run / "actor")
    (run / "report.md").write_text(f"# a/b\n\nFinished after {STEPS} steps, 3s. Recipe: ...\n")
    assert opened(run).finished
    (run / "report.md").write_text("# a/b\n\nStopped early after 2 steps, 3s. Recipe: ...\n")
    folder = opened(run)
    assert (folder.finished, folder.found.manifest.step) == (False, 2)


def test_a_finished_run_of_another_model_is_refused(tmp_path):
    run = ran(tmp_path / "run", checkpoints=(4,))
    with pytest.raises(ConfigError, match="has no actor, which this recipe trains"):
        RunFolder(run, recipe_of(run), STEPS, {"actor": {"hidden_size": 1}}, print)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path={}/checkpoints/setp_2"],
         "trainer.resume_from_path"),
        (["actor.optim.lr=0.5"], "actor.optim.lr: 1e-06 -> 0.5"),
        (["model.path={}/actor"], "would overwrite the model it starts from"),
        (["critic.path={}/warm_start", "trainer.warm_start_steps=3"], "critic.path"),
    ],
)  # fmt: skip
def test_a_refused_start_changes_nothing(tmp_path, keys, message):
    run = ran(tmp_path / "run")
    exported(run / "warm_start")
    assert message in refused(run, *[key.format(run) for key in keys])


@pytest.mark.parametrize(
    ("status", "keys"),
    [
        ("finished", ["actor.optim.lr=0.5", "trainer.on_existing_run=set_aside"]),
        ("finished", ["trainer.resume_mode=disable"]),
        ("running", []),
        ("", ["actor.optim.lr=0.5", "trainer.on_existing_run=set_aside"]),
    ],
)
def test_results_are_set_aside_completely_and_repeatedly(tmp_path, status, keys):
    run = ran(tmp_path / "run", status=status)
    (run / "notes.txt").write_text("of the user")
    for number in (1, 2):
        before = contents(run)
        folder = opened(run, *keys)
        assert contents(run) == before, "looking changes nothing"
        folder.begin()
        folder.begin()
        after = contents(run)
        moved = {name for name in before if not name.startswith(("earlier-", "notes"))}
        assert moved
        for name, content in before.items():
            assert after[f"earlier-{number}/{name}" if name in moved else name] == content
        assert len(after) == len(before)
        (run / "metrics.jsonl").write_text(NUMBERS)
        (run / "recipe.yaml").write_bytes((run / "earlier-1/recipe.yaml").read_bytes())
        if status:
            write_status(run, Status(status, STEPS, STEPS))


def test_files_newer_than_the_resumed_checkpoint_are_set_aside(tmp_path):
    run = ran(tmp_path / "run", checkpoints=(1, 2, 3, 4))
    exported(run / "hf/global_step_4")
    for step in (2, 3):
        (run / f"rollouts/step_{step}").mkdir(parents=True)
        (run / f"rollouts/step_{step}/step.json").write_text("{}")
    before = contents(run)
    path = f"trainer.resume_from_path={run}/checkpoints/global_step_1"
    folder = opened(run, "trainer.resume_mode=resume_path", path)
    assert contents(run) == before
    folder.begin()
    assert folder.found.manifest.step == 1
    kept = {name.removeprefix("earlier-1/") for name in contents(run)}
    assert kept == before.keys()
    assert (run / "earlier-1/metrics.jsonl").read_text() == NUMBERS
    assert (run / "earlier-1/actor/model.safetensors").exists()
    assert not (run / "actor").exists()
    assert not (run / "hf/global_step_4").exists()
    assert not list((run / "rollouts").iterdir())
    assert opened(run).found.manifest.step == 1, "the next start does not take the old branch"


def test_a_damaged_newer_checkpoint_is_set_aside_on_resume(tmp_path):
    run, said = ran(tmp_path / "run", status="running", checkpoints=(2, 5)), []
    flip(run / "checkpoints/global_step_5")
    folder = opened(run, said=said)
    assert "damaged checkpoint skipped" in said[0]
    folder.begin()
    assert folder.found.manifest.step == 2
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["global_step_2"]
    assert (run / "earlier-1/checkpoints/global_step_5/manifest.json").exists()


def test_resuming_a_killed_run_moves_nothing(tmp_path):
    run = ran(tmp_path / "run", status="running", step=2, checkpoints=(1, 2))
    (run / "checkpoints/.global_step_3.partial").mkdir()
    before = contents(run)
    folder = opened(run)
    folder.begin()
    assert folder.found.manifest.step == 2
    assert contents(run) == before
    assert not (run / "checkpoints/.global_step_3.partial").exists()


def test_files_that_no_run_wrote_are_renamed(tmp_path):
    run, said = tmp_path / "run", []
    run.mkdir()
    for name in ("recipe.yaml", "report.md", "status.json"):
        (run / name).write_text("of the user")
    opened(run, said=said).begin()
    assert sorted(p.name for p in run.iterdir()) == [
        "recipe.yaml.old-1", "report.md.old-1", "status.json.old-1"
    ]  # fmt: skip
    assert len(said) == 3


METRICS = {
    b"\xff\n": "line 2: is not UTF-8",
    b"[" * 100_000 + b"\n": "line 2: is not JSON",
    b'{"step": 2, "a": 1' + b"0" * 400 + b"}\n": "line 2: holds something that is not a number",
    b"3\n": "line 2: is not a JSON object with a step",
    b"{}\n": "line 2: is not a JSON object with a step",
    b'{"step": "2"}\n': "line 2: is not a JSON object with a step",
    b'{"step": 2, "a": "b"}\n': "line 2: holds something that is not a number",
    b'{"st\n{"step": 3}\n': "line 2: is not JSON",
}


@pytest.mark.parametrize("line", METRICS, ids=lambda line: repr(line[:20]))
def test_damaged_metrics_are_refused_with_the_line(tmp_path, line):
    run = ran(tmp_path / "run", status="running", checkpoints=(2,))
    (run / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line)
    message = refused(run)
    assert METRICS[line] in message
    assert "repair that line, or move the file away" in message


@pytest.mark.parametrize("last", [b"", b'{"ste', b"\xff\xff"])
def test_an_incomplete_last_line_is_ignored(tmp_path, last):
    run = ran(tmp_path / "run", status="running", checkpoints=(2,))
    (run / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + last)
    assert opened(run).found.manifest.step == 2


def test_a_flipped_bit_in_the_warm_start_is_noticed(tmp_path):
    keys = ["trainer.warm_start_steps=3"]
    run = ran(tmp_path / "run", *keys, status="running", checkpoints=(2,))
    exported(run / "warm_start", b"warm")
    assert opened(run, *keys).warm_start() == run / "warm_start"
    (run / "warm_start/model.safetensors").write_bytes(b"wasm")
    with pytest.raises(ConfigError, match="checksum differs from the one") as caught:
        opened(run, *keys).warm_start()
    assert "resume_mode=disable" in str(caught.value)
    assert "download" not in str(caught.value)
    (run / "warm_start/.mppo.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        opened(run, *keys).warm_start()
    (run / "warm_start/.mppo.json").unlink()  # as in folders of older versions
    assert opened(run, *keys).warm_start() == run / "warm_start"


def can_mount(folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    return not os.geteuid() and not subprocess.run(command, capture_output=True).returncode


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not can_mount(folder):
        pytest.skip("mounting a small tmpfs needs root and CAP_SYS_ADMIN")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_read_only_disk_is_refused_and_not_changed(small_disk):
    run = ran(small_disk / "run", status="running")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    before, folder = contents(run), opened(run)
    with pytest.raises(ConfigError, match=r"cannot be moved aside \(Read-only file system\)"):
        folder.begin()
    assert contents(run) == before


def test_a_full_disk_keeps_the_earlier_report(small_disk):
    report = small_disk / "report.md"
    report.write_text("the earlier one")
    with pytest.raises(OSError, match="No space left"):
        disk.write_bytes(small_disk / "filler", bytes(1 << 20))
    with pytest.raises(OSError, match=r"No space left on device: '.*report.md'"):
        disk.replace_text(report, "x" * 8192)
    assert report.read_text() == "the earlier one"
    assert sorted(path.name for path in small_disk.iterdir()) == ["filler", "report.md"]


def test_weights_that_mppo_exported_are_compared_and_others_are_not(tmp_path):
    folder = exported(tmp_path / "model")
    (folder / "config.json").write_text("{}")
    check_written("model.path", folder, "restore it", (".safetensors",))
    (folder / "model.safetensors").write_bytes(b"weightz")
    with pytest.raises(ConfigError, match=r"model\.safetensors: its checksum"):
        check_written("model.path", folder, "restore it", (".safetensors",))

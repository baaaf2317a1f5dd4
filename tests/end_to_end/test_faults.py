"""A run whose rank dies, hangs, gets a stop request, or computes non-finite numbers."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from launched_run import (
    ONE_STREAM,
    STEPS,
    LaunchedRun,
    keys,
    mpirun,
    same_weights,
    start_under,
    steps_logged,
    torchrun,
)
from malicious_pickle import add_malicious_pickle
from safetensors.torch import load_file
from shared_memory_files import check_nothing_is_left, shared_files
from transformers import AutoModelForCausalLM, AutoTokenizer

from mppo.dumps.stale import mark_stale
from mppo.parallel.addresses import free_port
from mppo.replay import main as replay
from mppo.train import main as train

GUARD = "mppo.supervision.rank_guard"
RESUMED = "resumed from"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The undisturbed run."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    run = LaunchedRun(run_dir)
    assert run.codes() == [0, 0], run.texts()
    return run_dir


def finishes_like(undisturbed: Path, run_dir: Path, launcher: Sequence[str] = ()) -> None:
    if launcher:
        code = start_under(launcher, run_dir).wait(timeout=500)
        codes, texts = [code], (run_dir / "output.txt").read_text()
    else:
        run = LaunchedRun(run_dir)
        codes, texts = run.codes(), run.texts()
    assert not any(codes), texts
    assert "resumed from" in texts
    assert steps_logged(run_dir) == STEPS
    assert same_weights(run_dir, undisturbed)


def test_samples_are_shown_at_the_start_in_the_middle_and_at_the_end(undisturbed):
    rows = [json.loads(line) for line in (undisturbed / "samples.jsonl").open()]
    assert [row["step"] for row in rows] == [step for step in (1, 3, 6) for _ in range(4)]
    assert [row["place"] for row in rows] == ["best", "worst", "", ""] * 3
    assert all(row["answer"] == row["response"].strip() for row in rows), "as the verifier reads it"
    shown = (undisturbed / "output_0.txt").read_text()
    opening = "mppo ", "device: ", "model: ", "layout: ", "engine: ", "data: ", "run folder: "
    # a library may warn before these lines and between them
    words = [word for line in shown.splitlines() for word in opening if line.startswith(word)]
    assert words[:7] == [*opening]
    assert "prompts: 64 (arithmetic 64); validation: 4 (arithmetic 4)\n" in shown
    assert re.findall(r"step (\d+): samples", shown) == ["1", "3", "6"]
    assert not re.search(r"step \d+: samples", (undisturbed / "output_1.txt").read_text())


def test_a_checkpoint_has_the_estimated_size(undisturbed):
    shown = (undisturbed / "output_0.txt").read_text()
    reported = re.search(
        r"^checkpoints: every 1 steps, ([\d.]+) MB each; all 6 are kept: ", shown, re.M
    )
    (checkpoint,) = (undisturbed / "checkpoints").glob("global_step_6")
    written = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    assert float(reported[1]) * 1e6 == pytest.approx(written, rel=0.05)


def test_the_exported_actor_is_a_model_that_transformers_loads_and_generates_with(undisturbed):
    folder = undisturbed / "actor"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    exported, loaded = load_file(folder / "model.safetensors"), model.state_dict()
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert exported.keys() == loaded.keys() - tied
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in exported.items())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("1+2=", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert answer.shape == (1, prompt["input_ids"].shape[1] + 5)
    assert tokenizer.decode(answer[0], skip_special_tokens=True).startswith("1+2=")


def test_the_first_line_of_a_resumed_run_shows_the_remaining_time(tmp_path, undisturbed):
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    run = LaunchedRun(tmp_path, ["trainer.total_training_steps=10000"])
    try:
        run.until(lambda: f"step {STEPS + 1:5d}/10000 | " in run.text(0))
    finally:
        run.kill()
    eta = re.search(r"/10000 \| eta (\S+)", run.text(0))[1]
    assert re.fullmatch(r"\d+(m|h)\d\d[sm]", eta), eta


def test_a_killed_rank_ends_the_job_and_the_next_start_continues(tmp_path, undisturbed):
    run = LaunchedRun(tmp_path)
    run.until_saved(2)
    run.send(1, signal.SIGKILL)
    assert run.codes() == [1, -signal.SIGKILL]
    text = run.text(0)
    assert re.search(r"mppo: no heartbeat for \d+ s from rank 1 of 2 \(pid \d+ on", text)
    assert re.search(r"which was in: .*; last completed step: [1-5]", text)
    finishes_like(undisturbed, tmp_path)


def test_a_rank_killed_in_the_middle_of_a_copy_to_host_memory_ends_the_job(tmp_path):
    before = shared_files()
    offload = "{parameters: true, gradients: true, optimizer: true}"
    both = [f"{role}.megatron.offload={offload}" for role in ("actor", "critic")]
    run = LaunchedRun(tmp_path, program="dying_copy", argv=keys(tmp_path, both))
    assert run.codes() == [1, -signal.SIGKILL]
    copied = re.search(r"^killed after (\d+) of (\d+) copies$", run.text(1), re.M)
    assert 0 < int(copied[1]) < int(copied[2])
    verdict = re.search(r"mppo: no heartbeat .* from rank 1 of 2 .*", run.text(0))[0]
    assert verdict.endswith("last completed step: 1")
    assert (tmp_path / "checkpoints/global_step_1/manifest.json").is_file()
    check_nothing_is_left(before)


def test_a_rank_killed_while_actor_and_critic_share_a_pipeline_ends_the_job(tmp_path):
    run = LaunchedRun(tmp_path, [*ONE_STREAM, "trainer.total_training_steps=200"])
    run.until_step(2)
    run.send(1, signal.SIGKILL)
    assert run.codes() == [1, -signal.SIGKILL]
    assert "rank 1 of 2" in run.text(0)


def test_under_torchrun_a_job_whose_first_rank_is_killed_and_then_stopped_starts_again_each_time(
    tmp_path, undisturbed
):
    """torchrun sends a stopped rank SIGTERM, which it cannot handle; its guard kills it."""
    log = tmp_path / "output.txt"
    launcher = start_under(torchrun(restarts=2), tmp_path)
    try:
        saved = tmp_path / "checkpoints/global_step_2"
        signal_first_rank(launcher, log, signal.SIGKILL, saved.is_dir)
        signal_first_rank(launcher, log, signal.SIGSTOP, lambda: RESUMED in log.read_text())
        assert launcher.wait(timeout=500) == 0, log.read_text()
    finally:
        launcher.terminate()
    killed, stopped, _ = log.read_text().split(RESUMED)
    assert "mppo: lost the connection to rank 0 of 2" in killed
    # its process and phase follow, unless it was stopped before its first heartbeat
    verdict = r"mppo: (no heartbeat for \d+ s from|lost the connection to) rank 0 of 2\b"
    assert re.search(verdict, stopped), stopped
    assert steps_logged(tmp_path) == STEPS
    assert same_weights(tmp_path, undisturbed)


def signal_first_rank(
    launcher: subprocess.Popen, log: Path, number: signal.Signals, when: Callable[[], bool]
) -> None:
    """Wait for a moment while torchrun runs, then send its first rank a signal."""
    while not when():
        assert launcher.poll() is None, log.read_text()
        time.sleep(0.05)
    ranks = psutil.Process(launcher.pid).children()
    (first,) = [rank for rank in ranks if rank.environ().get("RANK") == "0"]
    first.send_signal(number)


def guarded_ranks(launchers: Sequence[subprocess.Popen], log: Path) -> list[psutil.Process]:
    """The two ranks, in their order, as soon as both have their guards."""
    found: list[psutil.Process] = []
    while len(found) < 2:
        assert all(launcher.poll() is None for launcher in launchers), log.read_text()
        ranks = [rank for each in launchers for rank in psutil.Process(each.pid).children()]
        found = [rank for rank in ranks if any(GUARD in c.cmdline() for c in rank.children())]
        time.sleep(0.05)
    return sorted(found, key=lambda rank: rank.environ()["RANK"])


def ended(launchers: Sequence[subprocess.Popen], log: Path) -> list[int]:
    """The exit codes of launchers, which end by themselves."""
    try:
        return [launcher.wait(timeout=500) for launcher in launchers]
    finally:
        print(log.read_text())
        for launcher in launchers:
            if launcher.poll() is None:
                for process in (*psutil.Process(launcher.pid).children(), launcher):
                    process.kill()


@pytest.mark.parametrize("everyone", [False, True], ids=["the first rank", "every rank"])
def test_ranks_stopped_before_they_have_met_end_the_job(tmp_path, everyone):
    """No heartbeat watches them yet; this torchrun would give a stopped rank an hour."""
    launcher = start_under([*torchrun(), "--shutdown-timeout=3600"], tmp_path)
    log = tmp_path / "output.txt"
    for rank in guarded_ranks([launcher], log)[: 2 if everyone else 1]:
        rank.send_signal(signal.SIGSTOP)
    assert ended([launcher], log) == [1]
    # told by its own guard, or by the other rank's if it was stopped before its guard watched it
    told = r"mppo: (rank 0 of 2|a rank \(pid \d+) .* has been stopped for \d+ s"
    assert re.search(told, log.read_text())


def test_a_rank_that_ends_before_it_has_met_those_of_another_node_ends_them_too(tmp_path):
    """The other node's torchrun would wait as long as its rank: collective_timeout_s."""
    alone = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=1"]
    command = [sys.executable, "-m", "torch.distributed.run", *alone]
    command.append(f"--rdzv_endpoint=127.0.0.1:{free_port()}")
    launchers = [start_under(command, tmp_path) for _ in range(2)]
    log = tmp_path / "output.txt"
    guarded_ranks(launchers, log)[1].kill()
    assert ended(launchers, log) == [1, 1]
    text = log.read_text()
    if "The connection to the C10d store has failed" not in text:  # its torchrun had the store
        assert "a rank of another node ended before all ranks had met" in text


def test_a_hanging_rank_is_named_and_every_other_rank_writes_its_stacks(tmp_path):
    run = LaunchedRun(tmp_path)
    run.until_step(1)
    run.send(1, signal.SIGSTOP)
    assert run.codes() == [1, -signal.SIGKILL], "its guard kills the stopped rank"
    assert "no heartbeat" in run.text(0)
    assert re.search(r"mppo: rank 1 of 2 .* has been stopped for \d+ s, by SIGSTOP", run.text(1))
    stacks = (tmp_path / "stacks/rank_00000.txt").read_text()
    assert "from rank 1 of 2" in stacks
    assert re.search(r"this rank: \w+", stacks)
    assert "heartbeat.py" in stacks
    assert "loop.py" in stacks


PHASES = ("building critic", "gen, step 2", "weight sync", "save_checkpoint, step 2")


@pytest.fixture(scope="module")
def stopped_runs(tmp_path_factory) -> dict[str, LaunchedRun]:
    """A run for each phase, in which one of two ranks stops; all wait at the same time."""
    runs = {}
    for number, where in enumerate(PHASES):
        folder = tmp_path_factory.mktemp("stopped")
        argv = [str(number % 2), where, *keys(folder, steps=200)]
        runs[where] = LaunchedRun(folder, program="stopped_in_phase", argv=argv)
    return runs


@pytest.mark.parametrize("where", PHASES)
def test_a_rank_stopped_in_any_phase_ends_the_job(stopped_runs, where):
    run, stopped = stopped_runs[where], PHASES.index(where) % 2
    codes = run.codes()
    assert f"stopped in {where}" in run.text(stopped)
    assert (codes[stopped], codes[1 - stopped]) == (-signal.SIGKILL, 1), run.texts()
    assert re.search(rf"mppo: .* rank {stopped} of 2", run.text(1 - stopped)), run.texts()


@pytest.mark.parametrize(("number", "mpi"), [(signal.SIGUSR1, True), (signal.SIGINT, False)])
def test_on_a_stop_request_a_run_saves_and_exits_cleanly(tmp_path, undisturbed, number, mpi):
    """The first run resumes under mpirun, with the same bits."""
    launcher = mpirun() if mpi else ()
    run = LaunchedRun(tmp_path, ["trainer.save_freq=-1"])
    run.until_step(1)
    run.send(1, number)
    assert run.codes() == [0, 0], run.texts()
    done = steps_logged(tmp_path)
    assert 1 <= done < STEPS
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [f"global_step_{done}"]
    assert not (tmp_path / "actor").exists(), "an unfinished run exports nothing"
    finishes_like(undisturbed, tmp_path, launcher)


def test_a_step_too_long_for_sigterm_is_interrupted_and_the_step_before_is_saved(
    tmp_path, undisturbed
):
    run = LaunchedRun(tmp_path, ["trainer.save_freq=-1", "trainer.stop_within_s=0"])
    run.until_step(2)
    run.send(0, signal.SIGTERM)
    assert run.codes() == [0, 0], run.texts()
    assert "stopping: saving a checkpoint may take" in run.text(0)
    done = steps_logged(tmp_path)
    assert 2 <= done < STEPS
    if f"abandoned step {done + 1}" not in run.texts():
        assert "stopping after this step" in run.texts(), "the signal came amid the updates"
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [f"global_step_{done}"]
    finishes_like(undisturbed, tmp_path)


def test_a_second_stop_request_exits_at_once(tmp_path):
    unwatched = ["trainer.heartbeat_timeout_s=3600", "trainer.total_training_steps=200"]
    run = LaunchedRun(tmp_path, unwatched)
    try:
        run.until_step(1)
        run.send(1, signal.SIGSTOP)
        run.send(0, signal.SIGTERM)
        run.until(lambda: "stopping: " in run.text(0))
        time.sleep(1.5)  # a signal within a second is the same request
        run.send(0, signal.SIGTERM)
        assert run.code(0, patience_s=500) == 128 + signal.SIGTERM
    finally:
        run.kill()
    assert "SIGTERM again: exiting at once" in run.text(0)


BLOWN_UP = ["actor.optim.lr=1e30", "critic.optim.lr=1e17", "trainer.save_freq=-1"]


def main(argv: Sequence[str]) -> int:
    """A training rank that records whether it exited cleanly."""
    code = train(argv)
    print("left in order:", not dist.is_initialized())
    return code


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["trainer.align_overflow=true"], r"critic: loss nan.*actor: .*norm nan"),
        (ONE_STREAM, r"(critic|actor): loss .*; (critic|actor) took no step"),
    ],
    ids=["one role after the other", "one stream"],
)
def test_a_nonfinite_gradient_stops_the_run_and_can_be_replayed(settings, reason, tmp_path, capsys):
    run = LaunchedRun(tmp_path, [*BLOWN_UP, *settings], program=__name__)
    codes = run.codes()
    assert codes == [1, 1]
    text = run.texts()
    assert re.search(rf"loss or gradient norm at step 1.*{reason}", text), text
    assert text.count("gradient norm at step") == text.count("took no step") == 1, text
    assert text.count("left in order: True") == 2, text
    assert not (tmp_path / "stacks").exists()
    assert "Failed after 0 steps" in (tmp_path / "report.md").read_text()
    (case,) = (tmp_path / "nonfinite").iterdir()
    again = LaunchedRun(tmp_path / "again", program="mppo.replay", argv=[str(case)])
    assert again.codes() == [0, 0], again.texts()
    add_malicious_pickle(case / "models/actor/.metadata", tmp_path / "done")
    mark_stale(case.parent, done=0)
    assert replay([str(case)]) == 2
    out, reported = capsys.readouterr()
    assert f"{case}: a case of lost work: written before the run started anew" in out
    assert "actor/.metadata: holds more than a checkpoint's metadata" in reported
    assert "it names posix.mkdir; use a checkpoint from a source you trust" in reported
    assert not (tmp_path / "done").exists()
    assert re.search(r"rank \d: actor: gradient of chunk 0 \S+ has \d+ of \d+", again.texts())
    assert re.search(r"rank \d: critic: loss nan", again.texts())


def test_nonfinite_steps_are_skipped_counted_and_limited(tmp_path):
    skip = ["trainer.on_nonfinite=skip", "trainer.max_nonfinite_in_a_row=3", "actor.ppo_epochs=4"]
    skip.append("critic.ppo_epochs=4")  # in a row within one step: a policy of nan cannot generate
    run = LaunchedRun(tmp_path, [*BLOWN_UP, *skip])
    assert run.codes() == [1, 1]
    assert "3 time(s) in a row" in run.texts()


def test_a_nonfinite_warm_start_ends_the_run_and_writes_no_model(tmp_path):
    steps = ["trainer.warm_start_lr=1e30", "trainer.warm_start_steps=6"]
    run = LaunchedRun(tmp_path, steps)
    assert run.codes() == [1, 1]
    assert re.search(
        r"while warm start: NonFiniteStep: .* warm start step 2 of 6 is not finite \(warm start"
        r".*warm start took no step: lower trainer\.warm_start_lr",
        run.texts(),
    )
    assert not (tmp_path / "warm_start").exists()

"""The batch scripts on a real Slurm cluster of three nodes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, missing

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.extended,
    pytest.mark.server,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(missing() is not None, reason=missing() or "never"),
]

# trains by counting: saves and ends on USR1, goes on from what it saved
COUNTING = """
import json, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from mppo.parallel.launch import discover, process_group

asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
arguments = dict(a.split("=") for a in sys.argv[1:] if "=" in a)
saved, steps = Path(arguments["saved"]), int(arguments["steps"])
info = discover()
with process_group(info, 60):
    step = json.loads(saved.read_text())["step"] if saved.exists() else 0
    if info.rank == 0:
        print(f"counting from {step} by {info.how} of {info.world_size}", flush=True)
    while step < steps:
        time.sleep(0.1)
        step += 1
        flag = torch.tensor([len(asked)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if info.rank == 0:
            saved.write_text(json.dumps({"step": step}))
        if flag.item():
            print(f"rank {info.rank} saved {step}", flush=True)
            sys.exit(0)
    if info.rank == 0:
        print(f"counted to {step}", flush=True)
"""


@pytest.fixture(scope="module")
def cluster():
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    found = SlurmCluster(folder)
    try:
        found.start()
        yield found
    finally:
        found.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def job(cluster, tmp_path):
    """Submit ``slurm/ppo.sbatch``; job number and log."""

    def submit(*arguments: str, options: tuple[str, ...] = (), **environ: str):
        log = tmp_path / f"log-{len(list(tmp_path.glob('log-*')))}"
        settings = {
            "MPPO_PYTHON": sys.executable,
            "MPPO_ROOT": str(ROOT),
            "MPPO_RANKS_PER_NODE": "2",
            "MPPO_PREFLIGHT_S": "300",  # a busy machine imports torch slowly
            "PYTHONPATH": str(ROOT),
            **environ,
        }
        number = cluster.submit(
            f"--output={log}", "--nodes=2", "--time=20", "--cpus-per-task=2", *options,
            str(ROOT / "slurm" / "ppo.sbatch"), *arguments,
            environ=settings, cwd=tmp_path,
        )  # fmt: skip
        return number, log

    return submit


@pytest.fixture
def counting(tmp_path):
    """Environment and arguments of the counting trainer."""
    script = tmp_path / "counting.py"
    script.write_text(COUNTING)

    def make(steps: int) -> tuple[dict[str, str], list[str]]:
        environ = {"MPPO_ENTRY": str(script), "MPPO_PREFLIGHT": "0"}
        return environ, ["recipe", f"saved={tmp_path / 'saved.json'}", f"steps={steps}"]

    return make


def text_of(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else "(no log)"


def test_mpi_ranks_of_two_nodes_meet(cluster, job, counting):
    pytest.importorskip("mpi4py", reason='needs mpi4py: pip install "mppo[mpi]"')
    environ, arguments = counting(3)
    number, log = job(*arguments, MPPO_LAUNCH="mpi", **environ)
    assert cluster.wait_until_ended(number, 120) == "COMPLETED", text_of(log)
    assert "counting from 0 by mpi of 4" in text_of(log)


@pytest.mark.parametrize(("launch", "how"), [("torchrun", "torchrun"), ("srun", "slurm")])
def test_usr1_saves_requeues_and_goes_on(cluster, job, counting, launch, how):
    environ, arguments = counting(150)
    number, log = job(*arguments, MPPO_LAUNCH=launch, **environ)
    cluster.wait_for_text(log, f"counting from 0 by {how} of 4", 120)
    cluster.command("scancel", "--batch", "--signal=USR1", str(number))
    cluster.wait_for_text(log, "requeueing", 60)
    assert cluster.wait_until_ended(number, 180) == "COMPLETED", text_of(log)
    text = text_of(log)
    assert text.count("saved") == 4, text
    resumed = [line for line in text.splitlines() if line.startswith("counting from")]
    assert len(resumed) == 2
    assert resumed[1] != resumed[0]
    assert "counted to 150" in text
    assert cluster.field(number, "Restarts") == "1"


def test_a_preempted_job_comes_back_and_finishes(cluster, job, counting):
    environ, arguments = counting(150)
    number, log = job(*arguments, **environ)
    cluster.wait_for_text(log, "counting from 0", 120)
    first = cluster.submit(
        "--partition=high", "--nodes=3", "--exclusive", "--wrap=sleep 1",
        f"--output={log}-high", cwd=log.parent,
    )  # fmt: skip
    assert cluster.wait_until_ended(first, 120) == "COMPLETED"
    assert cluster.wait_until_ended(number, 240) == "COMPLETED", text_of(log)
    assert "saved" in text_of(log)
    assert "counted to 150" in text_of(log)


def test_a_cancelled_job_stays_cancelled(cluster, job, counting):
    environ, arguments = counting(10_000)
    number, log = job(*arguments, **environ)
    cluster.wait_for_text(log, "counting from 0", 120)
    cluster.command("scancel", str(number))
    assert cluster.wait_until_ended(number, 60) == "CANCELLED", text_of(log)
    assert "requeueing" not in text_of(log)
    assert cluster.field(number, "Restarts") == "0"


def test_a_bad_recipe_fails_before_any_rank_starts(cluster, job, tmp_path):
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("actor: {ppo_mini_batch: 3}\ndata: {task: arithmetic}\n")
    number, log = job(str(recipe))
    assert cluster.wait_until_ended(number, 120) == "FAILED", text_of(log)
    assert cluster.field(number, "ExitCode") == "2:0"
    assert "did you mean actor.ppo_mini_batch_size?" in text_of(log)
    assert "Traceback" not in text_of(log)


def test_a_recipe_trains_on_two_nodes(cluster, job, tmp_path):
    run = tmp_path / "run"
    number, log = job(
        str(ROOT / "recipes" / "tiny_cpu_tp2_pp2.yaml"),
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={run}",
        MPPO_CACHE=os.environ["MPPO_CACHE"],
    )
    assert cluster.wait_until_ended(number, 400) == "COMPLETED", text_of(log)
    text = text_of(log)
    assert "fits 4 ranks" in text
    assert "(torchrun, gloo) joined" in text
    assert (run / "metrics.jsonl").stat().st_size > 0
    assert list((run / "actor").glob("*.safetensors"))

"""The batch scripts on a real Slurm cluster of three nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from launched_run import same_weights, steps_logged
from slurm_cluster import SlurmCluster, missing

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(missing() is not None, reason=missing() or "never"),
]

COUNTED, STEPS = 60, 10

# "trains" by counting: on USR1 it saves and ends, then resumes
COUNTING = """
import json, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from mppo.parallel.launch import discover
from mppo.parallel.process_group import process_group

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
            saved.with_suffix(".new").write_text(json.dumps({"step": step}))
            saved.with_suffix(".new").rename(saved)
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


@pytest.fixture(scope="module")
def submit(cluster):
    """Submit ``slurm/ppo.sbatch`` from a folder, to two nodes unless the options say otherwise; job
    number and log."""

    def send(
        folder: Path, *arguments: str, options: Sequence[str] = (), **environ: str
    ) -> tuple[int, Path]:
        folder.mkdir(exist_ok=True)
        log = folder / f"log-{len(list(folder.glob('log-*')))}"
        settings = {
            "MPPO_PYTHON": sys.executable,
            "MPPO_ROOT": str(ROOT),
            "MPPO_RANKS_PER_NODE": "2",
            "MPPO_PREFLIGHT_S": "300",  # a busy machine imports torch slowly
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            **environ,
        }
        number = cluster.submit(
            f"--output={log}", "--nodes=2", "--time=20", "--cpus-per-task=2", *options,
            str(ROOT / "slurm" / "ppo.sbatch"), *arguments,
            environ=settings, cwd=folder,
        )  # fmt: skip
        return number, log

    return send


def counting(folder: Path, steps: int) -> list[str]:
    """Arguments of the counting trainer."""
    return ["recipe", f"saved={folder / 'saved.json'}", f"steps={steps}"]


def instead(folder: Path, launch: str) -> dict[str, str]:
    """The environment that has it take the place of the training."""
    script = folder / "counting.py"
    script.write_text(COUNTING)
    return {"MPPO_ENTRY": str(script), "MPPO_PREFLIGHT": "0", "MPPO_LAUNCH": launch}


@pytest.fixture
def count(cluster, submit, tmp_path):
    """Submit the counting trainer, wait for its first save; job number and log."""

    def send(steps: int, launch: str) -> tuple[int, Path]:
        number, log = submit(tmp_path, *counting(tmp_path, steps), **instead(tmp_path, launch))
        cluster.wait_for_text(log, "counting from 0", 200)
        cluster.wait_for_text(tmp_path / "saved.json", "step", 100)
        return number, log

    return send


def text_of(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else "(no log)"


def test_a_cancelled_job_is_not_requeued_and_the_next_of_its_chain_resumes(
    cluster, count, submit, tmp_path
):
    pytest.importorskip("mpi4py", reason='needs mpi4py: pip install "mppo[mpi]"')
    number, log = count(10_000, launch="mpi")
    cluster.wait_for_text(log, "counting from 0 by mpi of 4", 200)
    alone = {**instead(tmp_path, "srun"), "MPPO_RANKS_PER_NODE": "1"}
    one_node = ["--dependency=singleton", "--nodes=1"]
    follower, other = submit(tmp_path, *counting(tmp_path, 2), options=one_node, **alone)
    cluster.wait_for(  # a node is free, the name is not
        lambda: cluster.field(follower, "Reason") == "Dependency", 200, lambda: text_of(other)
    )
    cluster.command("scancel", str(number))
    assert cluster.wait_until_ended(number, 100) == "CANCELLED", text_of(log)
    assert "requeueing" not in text_of(log)
    assert cluster.field(number, "Restarts") == "0"
    assert cluster.wait_until_ended(follower, 200) == "COMPLETED", text_of(other)
    assert re.search(r"counting from [1-9]\d* by slurm of 1", text_of(other))


def test_before_its_time_limit_a_job_saves_requeues_and_resumes(cluster, count):
    """The limit is moved close: Slurm looks every half minute, and sends what the script asks for
    five minutes before the end."""
    number, log = count(10_000, launch="srun")
    cluster.wait_for_text(log, "counting from 0 by slurm of 4", 200)
    cluster.command("scontrol", "update", f"jobid={number}", "timelimit=5")
    cluster.wait_for_text(log, "told to save and requeue", 100)
    cluster.command("scontrol", "update", f"jobid={number}", "timelimit=20")
    again = "start 2: 2 nodes"
    cluster.wait_for(
        lambda: "counting from" in text_of(log).partition(again)[2], 200, lambda: text_of(log)
    )
    before, _, after = text_of(log).partition(again)
    assert before.count("saved") == 4, before
    last = re.search(r"saved (\d+)", before)[1]
    assert f"counting from {last} by slurm of 4" in after
    assert cluster.field(number, "Restarts") == "1"
    cluster.command("scancel", str(number))
    assert cluster.wait_until_ended(number, 100) == "CANCELLED", text_of(log)


def test_a_node_that_goes_down_costs_only_a_restart(cluster, count):
    number, log = count(COUNTED, launch="torchrun")
    cluster.wait_for_text(log, "counting from 0 by torchrun of 4", 200)
    first = cluster.field(number, "NodeList")
    lost = cluster.command("scontrol", "show", "hostnames", first).split()[1]
    # its daemon keeps running, so the node returns to service by itself
    cluster.command("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
    assert cluster.wait_until_ended(number, 300) == "COMPLETED", text_of(log)
    text = text_of(log)
    assert text.count("counting from") == 2, text
    assert text.count("counting from 0") == 1, text
    assert f"counted to {COUNTED}" in text
    assert cluster.field(number, "Restarts") == "1"


def test_a_bad_recipe_fails_before_any_rank_starts(cluster, submit, tmp_path):
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("actor: {ppo_mini_batch: 3}\ndata: {task: arithmetic}\n")
    number, log = submit(tmp_path, str(recipe))
    assert cluster.wait_until_ended(number, 200) == "FAILED", text_of(log)
    assert cluster.field(number, "ExitCode") == "2:0"
    assert "did you mean actor.ppo_mini_batch_size?" in text_of(log)
    assert "Traceback" not in text_of(log)
    assert "srun" not in text_of(log), "no node was asked"


def test_a_failing_node_is_reported_and_sigusr1_during_preflight_requeues(
    cluster, submit, tmp_path
):
    number, log = submit(tmp_path, str(ROOT / "recipes" / "tiny_cpu_tp2_pp2.yaml"))
    with socket.socket() as taken:  # the nodes are checked some seconds after the recipe
        taken.bind(("", 20_000 + number % 10_000))
        taken.listen()
        cluster.wait_for_text(log, "start 1: 2 nodes", 100)
        cluster.command("scancel", "--batch", "--signal=USR1", str(number))  # as on preemption
        assert cluster.wait_until_ended(number, 300) == "FAILED", text_of(log)
    text = text_of(log)
    assert cluster.field(number, "ExitCode") == "2:0", text
    head = r"^node +device +GPUs +driver +ranks +python +torch +CUDA +free disk$"
    assert re.search(head, text, re.MULTILINE)
    first, _, second = text.partition("start 2: 2 nodes")
    assert "told to save and requeue" in first
    for start in (first, second):
        assert start.count("the rendezvous port is in use") == 2, text
    assert "told to save and requeue" not in second
    assert "fix: submit the job again" in text
    assert "Traceback" not in text
    assert "joined" not in text, "no rank was started"


# shows how it was started, instead of training or serving
SHOWING = """#!/bin/bash
case "$*" in
  *mppo.serve*) echo "$SLURMD_NODENAME serves: $* key of ${#MPPO_ROLLOUT_API_KEY}"; sleep 100 ;;
  *) echo "$SLURMD_NODENAME trains: $*"; sleep 3 ;;
esac
"""


def test_the_second_component_of_a_heterogeneous_job_serves(cluster, tmp_path):
    showing, log = tmp_path / "showing.sh", tmp_path / "log"
    showing.write_text(SHOWING)
    showing.chmod(0o755)
    environ = {"MPPO_ROOT": str(ROOT), "MPPO_PYTHON": str(showing), "MPPO_PREFLIGHT": "0"}
    number = cluster.submit(
        f"--output={log}", "--nodes=2", ":", "--nodes=1",
        str(ROOT / "slurm" / "ppo.sbatch"), "x.yaml", "data.seed=3",
        environ=environ, cwd=tmp_path,
    )  # fmt: skip
    assert cluster.wait_until_ended(number, 100) == "COMPLETED", text_of(log)
    lines = text_of(log).splitlines()
    (server,) = [line for line in lines if " serves: " in line]
    trainers = [line for line in lines if " trains: " in line]
    assert len(trainers) == 2
    assert len({line.split()[0] for line in [server, *trainers]}) == 3, "each on a node of its own"
    port = re.search(r"--host 127.0.0.1 --port (\d+) --config x.yaml data.seed=3", server)[1]
    assert server.endswith("key of 48")
    for line in trainers:
        assert "--config x.yaml data.seed=3 rollout.name=sglang" in line
        assert f"rollout.sync=distributed rollout.urls=[http://127.0.0.1:{port}]" in line


def test_sglang_on_one_node_serves_training_on_another(cluster, submit, tmp_path):
    run = tmp_path / "run"
    number, log = submit(
        tmp_path,
        str(ROOT / "recipes" / "tiny_cpu_sglang.yaml"),
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={run}",
        options=["--nodes=1", ":", "--nodes=1", "--cpus-per-task=2"],
        MPPO_PREFLIGHT="0",
    )
    assert cluster.wait_until_ended(number, 600) == "COMPLETED", text_of(log)
    port = 30000 + number % 10000
    assert f"waiting for the SGLang server at http://127.0.0.1:{port}" in text_of(log)
    assert steps_logged(run) == 2
    for line in (run / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["training/rollout_logprob_diff_max"] < 1e-4
    cluster.wait_for(lambda: not answers(port), 30, lambda: text_of(log))


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_conversion_and_evaluation_are_started_with_their_arguments(cluster, tmp_path):
    showing = tmp_path / "apptainer"  # in place of that program
    showing.write_text(SHOWING)
    showing.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environ = {"MPPO_ROOT": str(ROOT), "MPPO_PYTHON": str(showing), "PATH": path}
    convert = "-m checkpoints_convert verify a b"
    inside = f"exec --nv --bind {ROOT} /images/x.sif {showing} {convert}"
    started = {
        "convert": (["verify", "a", "b"], "", f"trains: {convert}"),
        "inside": (["verify", "a", "b"], "/images/x.sif", f"trains: {inside}"),
        "eval": (["x.yaml", "model.path=y"], "", "/evaluate.py --config x.yaml model.path=y"),
    }
    jobs = {}
    for name, (arguments, container, _) in started.items():
        script = "eval.sbatch" if name == "eval" else "convert.sbatch"
        jobs[name] = cluster.submit(
            f"--output={tmp_path / name}", str(ROOT / "slurm" / script), *arguments,
            environ={**environ, "MPPO_CONTAINER": container}, cwd=tmp_path,
        )  # fmt: skip
    for name, (_, _, command) in started.items():
        assert cluster.wait_until_ended(jobs[name], 100) == "COMPLETED", text_of(tmp_path / name)
        (line,) = [x for x in text_of(tmp_path / name).splitlines() if " trains: " in x]
        assert line.endswith(command)


def ppo(run: Path) -> list[str]:
    """A recipe of quick steps on 2 x 2 ranks; actor, critic and reference in three layouts."""
    return [
        str(ROOT / "recipes" / "tiny_cpu_tp2_pp2.yaml"),
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=5",
        "data.val_size=0",
        "actor.ppo_mini_batch_size=4",
        "trainer.val_before_train=false",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.default_local_dir={run}",
    ]


@pytest.fixture(scope="module")
def undisturbed(cluster, submit, tmp_path_factory) -> tuple[Path, str]:
    """Folder and log of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    number, log = submit(folder, *ppo(folder / "run"))
    assert cluster.wait_until_ended(number, 600) == "COMPLETED", text_of(log)
    return folder / "run", text_of(log)


def test_a_recipe_trains_on_two_nodes(undisturbed):
    run, text = undisturbed
    assert "fits 4 ranks" in text
    assert "(torchrun, gloo) joined" in text
    assert steps_logged(run) == STEPS
    assert list((run / "actor").glob("*.safetensors"))


def test_a_preempted_job_ends_with_the_weights_of_an_undisturbed_run(
    cluster, submit, undisturbed, tmp_path
):
    run = tmp_path / "run"
    number, log = submit(tmp_path, *ppo(run), MPPO_PREFLIGHT="0")
    cluster.wait_for(lambda: steps_logged(run) >= 1, 300, lambda: text_of(log))
    high = cluster.submit(
        "--partition=high", "--nodes=3", "--exclusive", "--wrap=sleep 1",
        f"--output={tmp_path}/high", cwd=tmp_path,
    )  # fmt: skip
    assert cluster.wait_until_ended(high, 300) == "COMPLETED", text_of(log)
    assert cluster.wait_until_ended(number, 600) == "COMPLETED", text_of(log)
    text = text_of(log)
    assert cluster.field(number, "Restarts") == "1", text
    assert "stopping after this step: SIGUSR1" in text
    assert "resumed from" in text
    assert steps_logged(run) == STEPS
    assert same_weights(run, undisturbed[0])


def test_a_trained_model_is_converted_verified_and_evaluated(cluster, undisturbed, tmp_path):
    actor = undisturbed[0] / "actor"
    sides = ["--hf", str(actor), "--megatron", str(tmp_path / "megatron")]
    scores = tmp_path / "scores.json"
    jobs = {
        "hf-to-megatron": ["convert.sbatch", "hf-to-megatron", *sides],
        "verify": ["convert.sbatch", "verify", *sides],
        "eval": ["eval.sbatch", *ppo(tmp_path), f"model.path={actor}", "data.val_size=4",
                 "--out", str(scores)],
    }  # fmt: skip
    environ = {
        "MPPO_ROOT": str(ROOT),
        "MPPO_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    for name, (script, *arguments) in jobs.items():
        log, environ["MPPO_RANKS_PER_NODE"] = tmp_path / name, "4" if name == "eval" else "2"
        number = cluster.submit(
            f"--output={log}", str(ROOT / "slurm" / script), *arguments,
            environ=environ, cwd=tmp_path,
        )  # fmt: skip
        assert cluster.wait_until_ended(number, 300) == "COMPLETED", text_of(log)
    assert re.search(r"(\d+) of \1 ", text_of(tmp_path / "verify")), "all tensors are equal"
    result = json.loads(scores.read_text())
    assert result["prompts"] == 4
    assert 0 <= result["val/reward"] <= 1
    assert 1 <= result["val/response_length/mean"] <= 5

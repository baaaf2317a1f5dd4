"""Kill a training run at random, again and again; every resume must lose nothing.

``make soak``, or ``python benchmarks/soak.py --minutes 10 --seed 0``. One run goes undisturbed.
Then runs of the same recipe are killed with SIGKILL at random moments (a rank, the launcher; while
a checkpoint is written, while loading, at any time) and started again until they finish. Each must
end with exactly the weights and metrics of the undisturbed one. Exit code 0 if all did.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
RECIPE = [
    "model.path=builtin:tiny",
    "model.dtype=float32",
    "data.task=arithmetic",
    "data.train_size=64",
    "data.val_size=4",
    "data.max_prompt_length=16",
    "data.max_response_length=5",
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=4",
    "actor.optim.lr=1e-3",
    "actor.megatron.tensor_model_parallel_size=2",
    "critic.megatron.pipeline_model_parallel_size=2",
    "trainer.val_before_train=false",
    "trainer.save_freq=1",
    "trainer.max_ckpt_to_keep=3",
    "trainer.heartbeat_timeout_s=10",
]
TARGETS = ("a rank", "the launcher")
MOMENTS = ("while saving", "at any time", "soon after the start")
NOT_COMPARED = ("timing", "perf/")


@dataclass
class Tally:
    """What was done and what came of it."""

    kills: Counter = field(default_factory=Counter)
    resumed_from: list[int] = field(default_factory=list)
    runs: int = 0
    failures: list[str] = field(default_factory=list)

    def summary(self) -> str:
        lines = [f"{self.runs} runs finished, {self.kills.total()} kills:"]
        lines += [f"  {count:3d} x {what}" for what, count in sorted(self.kills.items())]
        lines += [f"resumed from steps {self.resumed_from}"]
        lines += self.failures or ["every run ended with the undisturbed run's weights and metrics"]
        return "\n".join(lines)


def start(run_dir: Path, steps: int) -> subprocess.Popen:
    """Start or resume a run of two ranks under torchrun."""
    keys = [*RECIPE, f"trainer.total_training_steps={steps}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node=2", str(ROOT / "mppo/train.py"), *keys]
    run_dir.mkdir(exist_ok=True)
    with (run_dir / "output.txt").open("a") as stream:
        return subprocess.Popen(
            [*command, f"trainer.default_local_dir={run_dir}"],
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            start_new_session=True,
        )


def wait_for(moment: str, launcher: subprocess.Popen, run_dir: Path, typical_s: float, rng) -> bool:
    """Wait for a moment of the kind; False if the run ended before it came."""
    span = {"at any time": typical_s, "soon after the start": typical_s / 4}
    deadline = time.monotonic() + rng.uniform(0, span.get(moment, typical_s))
    while launcher.poll() is None:
        late = time.monotonic() > deadline
        saving = any((run_dir / "checkpoints").glob(".global_step_*.partial"))
        if late and (moment != "while saving" or saving):
            return True
        time.sleep(0.002)
    return False


def kill(target: str, launcher: subprocess.Popen, rng) -> None:
    """SIGKILL to the launcher or to one of its ranks; then wait until none of them is left."""
    family = psutil.Process(launcher.pid).children(recursive=True)
    ranks = [p for p in family if "train.py" in " ".join(p.cmdline())]
    victim = launcher.pid if target == "the launcher" or not ranks else rng.choice(ranks).pid
    os.kill(victim, signal.SIGKILL)
    launcher.wait()
    gone, alive = psutil.wait_procs(family, timeout=60)
    for process in alive:
        process.kill()
    assert not alive, f"{len(alive)} of {len(gone) + len(alive)} processes outlived the job"


def disturb(run_dir: Path, steps: int, typical_s: float, deadline: float, rng, tally) -> bool:
    """Kill and resume one run until it finishes; False when the time is up before."""
    while time.monotonic() < deadline:
        launcher = start(run_dir, steps)
        target, moment = rng.choice(TARGETS), rng.choice(MOMENTS)
        if wait_for(moment, launcher, run_dir, typical_s, rng):
            kill(target, launcher, rng)
            tally.kills[f"{target}, {moment}"] += 1
            continue
        if launcher.wait() != 0:
            tally.failures.append(f"{run_dir}: ended with {launcher.returncode}, see output.txt")
            return False
        return True
    return False


def outcome(run_dir: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Final weights, and metrics without times."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in m.items() if not k.startswith(NOT_COMPARED)} for m in lines]
    return load_file(run_dir / "actor/model.safetensors"), metrics


def compare(run_dir: Path, reference: Path) -> list[str]:
    """Differences between two finished runs."""
    (weights, metrics), (wanted, wanted_metrics) = outcome(run_dir), outcome(reference)
    different = [name for name in wanted if not torch.equal(wanted[name], weights[name])]
    found = [f"{run_dir}: {len(different)} weights differ, such as {different[0]}"] * bool(
        different
    )
    if metrics != wanted_metrics:
        found.append(f"{run_dir}: metrics differ")
    return found


def resumed_steps(run_dir: Path) -> list[int]:
    """The steps a run was resumed from, by its recorded checkpoints' names in its output."""
    text = (run_dir / "output.txt").read_text()
    return [int(part.split()[0]) for part in text.split("after step ")[1:]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng, tally = random.Random(arguments.seed), Tally()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mppo_soak_") as folder:
        root = Path(folder)
        reference = root / "undisturbed"
        if start(reference, arguments.steps).wait() != 0:
            print((reference / "output.txt").read_text())
            return 1
        typical_s = time.monotonic() - began
        print(f"undisturbed: {arguments.steps} steps in {typical_s:.0f} s", flush=True)
        deadline = began + 60 * arguments.minutes
        while time.monotonic() < deadline and not tally.failures:
            run_dir = root / f"run_{tally.runs}"
            if not disturb(run_dir, arguments.steps, typical_s, deadline, rng, tally):
                break
            tally.runs += 1
            tally.failures += compare(run_dir, reference)
            tally.resumed_from += resumed_steps(run_dir)
            print(f"run {tally.runs}: {tally.kills.total()} kills so far", flush=True)
        for failure in tally.failures:
            print((Path(failure.split(":")[0]) / "output.txt").read_text()[-3000:])
    print(tally.summary())
    return 1 if tally.failures or not tally.runs else 0


if __name__ == "__main__":
    sys.exit(main())

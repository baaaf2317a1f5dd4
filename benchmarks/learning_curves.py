"""Reward by step of several estimators, engines and seeds on the demo's task, in one plot.

    python benchmarks/learning_curves.py [--estimators gae grpo ...] [--engines local sglang]
        [--seeds 0 1 2] [--steps 200]

Trains ``recipes/demo.yaml`` once per combination, one after another. Estimators without a critic
use a learning rate of 2e-4; grpo samples eight responses to each of 64 prompts, rloo four to each
of 128; rloo whitens its advantages, an option that TRL has too. ``--processes 1`` trains without
parallelism, which changes numbers only by float rounding. Runs are kept in ``--runs``: a finished
run is not repeated, an interrupted run resumes from its checkpoint.

Writes ``<out>.png`` and ``<out>.json``: the mean reward of the sampled responses by step, and the
held-out reward. A run passes if its sampled reward at least doubles from the first ten steps to
the last ten, and ends above 0.8. With two engines, the final rewards of the seeds are compared:
they agree if their means differ by at most two standard errors of the difference.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import mean, variance

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

ROOT = Path(__file__).resolve().parents[1]
CRITIC_FREE = ["actor.optim.lr=2e-4", "actor.optim.min_lr=2e-5"]
EIGHT = ["rollout.n=8", "data.train_batch_size=64", "actor.ppo_mini_batch_size=16"]
FOUR = ["rollout.n=4", "data.train_batch_size=128", "actor.ppo_mini_batch_size=32"]
ESTIMATORS = {
    "gae": [],
    "grpo": [*EIGHT, *CRITIC_FREE],
    "rloo": [*FOUR, *CRITIC_FREE, "algorithm.whiten_advantages=true"],
    "reinforce_plus_plus": CRITIC_FREE,
}
"""Changes of each estimator or engine to the demo's recipe."""
ALONE = [
    "actor.megatron.tensor_model_parallel_size=1",
    "critic.megatron.pipeline_model_parallel_size=1",
]
ENGINES = {"local": [], "sglang": ["rollout.server_args={max_total_tokens: 16384}"]}
THRESHOLD, FACTOR, WINDOW = 0.8, 2.0, 10
Curve = list[tuple[int, float]]


def train(
    estimator: str, engine: str, seed: int, arguments: argparse.Namespace, folder: Path
) -> list[dict[str, float]]:
    """One run; its metrics, line by line."""
    run_dir = folder / f"{estimator}-{engine}-{seed}-{arguments.steps}"
    overrides = [
        f"algorithm.adv_estimator={estimator}",
        f"rollout.name={engine}",
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={arguments.steps}",
        f"trainer.default_local_dir={run_dir}",
        "trainer.export_hf=false",
        *ESTIMATORS[estimator],
        *ENGINES[engine],
        *(ALONE if arguments.processes == 1 else []),
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={arguments.processes}", str(ROOT / "mppo/train.py")]
    command += ["--config", str(ROOT / "recipes/demo.yaml")]
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists() or read(metrics)[-1]["step"] < arguments.steps:
        subprocess.run([*command, *overrides], check=True, cwd=ROOT)
    return read(metrics)


def read(metrics: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics."""
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def curve(lines: list[dict[str, float]], name: str) -> Curve:
    """``(step, value)`` of a metric, where it was logged."""
    return [(int(line["step"]), line[name]) for line in lines if name in line]


def ends(points: Curve) -> tuple[float, float]:
    """Mean of the first and of the last ten steps of a curve."""
    values = [value for _, value in points]
    return mean(values[:WINDOW]), mean(values[-WINDOW:])


def smoothed(points: Curve, width: int = 5) -> Curve:
    """Mean over the last ``width`` steps."""
    values = [value for _, value in points]
    parts = [values[max(0, i + 1 - width) : i + 1] for i in range(len(values))]
    return [(step, sum(part) / len(part)) for (step, _), part in zip(points, parts)]


def compared(a: list[float], b: list[float]) -> dict[str, object]:
    """The difference of two groups of rewards, and its standard error."""
    noise = 2 * sqrt(variance(a) / len(a) + variance(b) / len(b))
    gap = abs(mean(a) - mean(b))
    return {"difference": gap, "two_standard_errors": noise, "agree": gap <= noise}


def label(estimator: str, engine: str, seed: int) -> str:
    """Name of a run."""
    return f"{estimator}, {engine}, seed {seed}"


def plot(curves: dict[str, Curve], path: Path) -> None:
    """Sampled reward by step, one line for each run."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, points in curves.items():
        axes.plot(*zip(*smoothed(points)), label=name)
    axes.axhline(THRESHOLD, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="PPO step", ylabel="mean reward (over 5 steps)", ylim=(0, 1.02))
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--estimators", nargs="+", default=list(ESTIMATORS))
    parser.add_argument("--engines", nargs="+", default=["local"], choices=list(ENGINES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--processes", type=int, choices=(1, 2), default=2)
    parser.add_argument("--runs", type=Path, help="folder to keep the runs in")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/learning_curves")
    arguments = parser.parse_args()
    held_out, sampled, verdicts = {}, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        runs = (arguments.runs or Path(folder)).resolve()
        for case in product(arguments.estimators, arguments.engines, arguments.seeds):
            lines, name = train(*case, arguments, runs), label(*case)
            held_out[name] = curve(lines, "val/reward")
            sampled[name] = curve(lines, "critic/score/mean")
            first, last = ends(sampled[name])
            verdicts[name] = last > THRESHOLD and last >= FACTOR * first
            word = "passes" if verdicts[name] else "does NOT pass"
            print(f"{name}: {first:.3f} -> {last:.3f}, {word}", flush=True)
    engines = {}
    if len(arguments.engines) == 2 and len(arguments.seeds) > 1:
        for name in arguments.estimators:
            finals = [
                [ends(sampled[label(name, engine, seed)])[1] for seed in arguments.seeds]
                for engine in arguments.engines
            ]
            engines[name] = compared(*finals)
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "recipe": "recipes/demo.yaml",
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, "
        f"{arguments.processes} process(es)",
        "torch": torch.__version__,
        "passes": verdicts,
        "engines": engines,
        "sampled_reward_first_and_last_ten_steps": {k: ends(v) for k, v in sampled.items()},
        "held_out_reward": held_out,
        "sampled_reward": sampled,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1)
    arguments.out.with_suffix(".json").write_text(text + "\n")
    plot(sampled, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()

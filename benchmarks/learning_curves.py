"""Reward by step of several estimators on the demo's task, in one plot.

    python benchmarks/learning_curves.py [--estimators gae grpo ...] [--steps 160] [--seed 0]

Trains ``recipes/demo.yaml`` once for each estimator, one after another. grpo and rloo take four
responses to each of a quarter as many prompts, so that every step sees as many responses, in
mini-batches of half the size; rloo whitens its advantages as TRL can.
With ``--processes 1`` a run takes one process without any parallelism, which changes no number
beyond float noise. Runs are kept under ``--runs``: one that is done there is not trained again, one
that was stopped goes on from its checkpoint.

Writes ``<out>.png`` and ``<out>.json``: the mean reward of the sampled responses by step, and the
held-out reward. An estimator passes if its sampled reward at least doubles from the first tenth of
the steps to the last, and ends above 0.8.
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
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

ROOT = Path(__file__).resolve().parents[1]
GROUPED = ["rollout.n=4", "data.train_batch_size=64", "actor.ppo_mini_batch_size=16"]
ESTIMATORS = {
    "gae": [],
    "grpo": GROUPED,
    "rloo": [*GROUPED, "algorithm.whiten_advantages=true"],
    "reinforce_plus_plus": [],
}
"""What each changes in the demo's recipe."""
ALONE = [
    "actor.megatron.tensor_model_parallel_size=1",
    "critic.megatron.pipeline_model_parallel_size=1",
]
THRESHOLD, FACTOR = 0.8, 2.0
Curve = list[tuple[int, float]]


def train(estimator: str, arguments: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """One run; its metrics, line by line."""
    run_dir = folder / f"{estimator}-{arguments.seed}-{arguments.steps}"
    overrides = [
        f"algorithm.adv_estimator={estimator}",
        f"trainer.seed={arguments.seed}",
        f"trainer.total_training_steps={arguments.steps}",
        f"trainer.default_local_dir={run_dir}",
        "trainer.export_hf=false",
        *ESTIMATORS[estimator],
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


def tenths(points: Curve) -> tuple[float, float]:
    """Mean of the first and of the last tenth of a curve."""
    count = max(len(points) // 10, 1)
    values = [value for _, value in points]
    return sum(values[:count]) / count, sum(values[-count:]) / count


def smoothed(points: Curve, width: int = 5) -> Curve:
    """Mean over the last ``width`` steps."""
    values = [value for _, value in points]
    parts = [values[max(0, i + 1 - width) : i + 1] for i in range(len(values))]
    return [(step, sum(part) / len(part)) for (step, _), part in zip(points, parts)]


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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--processes", type=int, choices=(1, 2), default=2)
    parser.add_argument("--runs", type=Path, help="folder to keep the runs in")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/learning_curves")
    arguments = parser.parse_args()
    held_out, sampled, verdicts = {}, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for estimator in arguments.estimators:
            lines = train(estimator, arguments, (arguments.runs or Path(folder)).resolve())
            held_out[estimator] = curve(lines, "val/reward")
            sampled[estimator] = curve(lines, "critic/score/mean")
            first, last = tenths(sampled[estimator])
            verdicts[estimator] = last > THRESHOLD and last >= FACTOR * first
            word = "passes" if verdicts[estimator] else "does NOT pass"
            print(f"{estimator}: {first:.3f} -> {last:.3f}, {word}")
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "recipe": "recipes/demo.yaml",
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, "
        f"{arguments.processes} process(es)",
        "torch": torch.__version__,
        "passes": verdicts,
        "sampled_reward_first_and_last_tenth": {k: tenths(v) for k, v in sampled.items()},
        "held_out_reward": held_out,
        "sampled_reward": sampled,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1)
    arguments.out.with_suffix(".json").write_text(text + "\n")
    plot(sampled, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()

"""Reward by step of several estimators on the demo's task, in one plot.

    python benchmarks/learning_curves.py [--estimators gae grpo ...] [--steps 60] [--seeds 0]

Trains ``recipes/demo.yaml`` once for each estimator and seed, one after another, on two torchrun
processes. The critic-free estimators take four responses to each of a quarter as many prompts, so
that every step sees as many responses. Writes ``<out>.png`` and ``<out>.json``.
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
ESTIMATORS = ("gae", "grpo", "rloo", "reinforce_plus_plus")
GROUPED = ["rollout.n=4", "data.train_batch_size=32", "actor.ppo_mini_batch_size=16"]
THRESHOLD = 0.8


def train(estimator: str, seed: int, steps: int, folder: Path) -> list[dict[str, float]]:
    """One run; its metrics, line by line."""
    run_dir = folder / f"{estimator}-{seed}"
    overrides = [
        f"algorithm.adv_estimator={estimator}",
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={run_dir}",
        "trainer.export_hf=false",
        *([] if estimator == "gae" else GROUPED),
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "mppo/train.py"), "--config", str(ROOT / "recipes/demo.yaml")]
    subprocess.run([*command, *overrides], check=True, cwd=ROOT)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def curve(lines: list[dict[str, float]], name: str) -> list[tuple[int, float]]:
    """``(step, value)`` of a metric, where it was logged."""
    return [(int(line["step"]), line[name]) for line in lines if name in line]


def plot(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Held-out reward by step, one line for each run."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, points in curves.items():
        axes.plot(*zip(*points), marker="o", markersize=3, label=name)
    axes.axhline(THRESHOLD, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="PPO step", ylabel="held-out reward", ylim=(0, 1.02))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--estimators", nargs="+", default=ESTIMATORS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/learning_curves")
    arguments = parser.parse_args()
    held_out, training = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for estimator in arguments.estimators:
            for seed in arguments.seeds:
                lines = train(estimator, seed, arguments.steps, Path(folder))
                name = estimator if len(arguments.seeds) == 1 else f"{estimator}, seed {seed}"
                held_out[name] = curve(lines, "val/reward")
                training[name] = curve(lines, "critic/score/mean")
    for name, points in held_out.items():
        verdict = "reaches" if points[-1][1] >= THRESHOLD else "does NOT reach"
        print(f"{name}: {points[0][1]:.3f} -> {points[-1][1]:.3f}, {verdict} {THRESHOLD}")
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "recipe": "recipes/demo.yaml",
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, 2 processes",
        "torch": torch.__version__,
        "held_out_reward": held_out,
        "training_reward": training,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    plot(held_out, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()

"""Learning from different initial value heads: two tasks, many seeds, one process.

    python benchmarks/value_head.py [--seeds 24] [--steps 70] [--warm-start 120]
        [--heads 0 inverse_hidden ...] [--tasks sort_digits reverse] [--runs FOLDER] [--out FILE]

For each task and seed, a model of two layers (width 128) is drawn and warmed up once; PPO then
starts from it with every ``critic.value_head_init``. The runs of a seed have the prompts and random
numbers in common, so heads are compared by differences within a seed. ``trainer.seed`` is the seed.
A finished run in ``--runs`` is not repeated.

Writes ``<out>.json`` (the reward of every step), ``<out>.svg`` (mean over the seeds with twice its
standard error) and ``<out>.md``: the reward of the last steps; its differences between heads with a
bootstrap interval and the p-value of a sign-flip test.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import combinations
from math import sqrt
from pathlib import Path
from random import Random
from statistics import mean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from record import conditions
from transformers import AutoConfig, AutoModelForCausalLM

from mppo.hub.builtin import MODELS, byte_tokenizer
from mppo.train import main as train

TASKS = {
    "sort_digits": "{min_length: 2, max_length: 3}",
    "reverse": "{min_length: 2, max_length: 3, alphabet: abcd}",
}
"""``data.task_kwargs`` by ``data.task``."""
SIZE = {"num_hidden_layers": 2, "intermediate_size": 128}
"""Of the model, which otherwise is ``builtin:tiny``."""
RECIPE = [
    "model.dtype=float32",
    "data.max_prompt_length=24",
    "data.max_response_length=8",
    "data.train_batch_size=64",
    "data.val_size=8",
    "actor.ppo_mini_batch_size=32",
    "actor.ppo_micro_batch_size_per_gpu=32",
    "actor.optim={lr: 5e-4, min_lr: 2e-5, lr_decay_style: linear}",
    "critic.ppo_micro_batch_size_per_gpu=32",
    "critic.optim.lr=1e-3",
    "rollout.name=local",
    "rollout.batch_size=64",
    "trainer.warm_start_batch_size=32",
    "trainer.val_before_train=false",
    "trainer.export_hf=false",
    "trainer.logger=[jsonl]",
    "trainer.num_sample_generations=0",
]
LAST, RESAMPLES = 5, 10_000
FINISHED = "finished"
Rewards = dict[str, list[list[float]]]
"""By head: the mean sampled reward of every step, for every seed."""


def draw_model(seed: int, folder: Path, size: Mapping[str, int]) -> None:
    """Write a ``builtin:tiny`` with random weights, but of this size."""
    fields = {**MODELS["tiny"], **size}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def rewards(run: Path, seed: int, steps: int, settings: list[str]) -> list[float]:
    """The mean sampled reward of every step of a run, trained unless it has finished."""
    finished = run / FINISHED
    if not finished.exists():
        shutil.rmtree(run, ignore_errors=True)
        code = train([
            "--quiet", *RECIPE, *settings, f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={run}", f"trainer.seed={seed}", f"data.seed={seed}",
        ])  # fmt: skip
        if code:
            raise SystemExit(code)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [line["critic/score/mean"] for line in lines if "critic/score/mean" in line]
    if len(curve) < steps:
        raise SystemExit(f"{run}: stopped after step {len(curve)} of {steps}; start again")
    finished.touch()
    return curve


def train_seed(
    task: str, seed: int, arguments: argparse.Namespace, place: Path
) -> Iterator[list[float]]:
    """The rewards of every head, from one model."""
    settings = [f"data.task={task}", f"data.task_kwargs={TASKS[task]}"]
    if not (place / "warm" / FINISHED).exists():
        draw_model(seed, place / "model", SIZE)
    warm_start = [
        f"model.path={place / 'model'}",
        f"trainer.warm_start_steps={arguments.warm_start}",
    ]
    rewards(place / "warm", seed, 1, [*settings, *warm_start])
    settings.append(f"model.path={place / 'warm' / 'warm_start'}")
    for head in arguments.heads:
        init = f"critic.value_head_init={head}"
        curve = rewards(place / head, seed, arguments.steps, [*settings, init])
        print(f"seed {seed}, {task}, {head}: {final(curve):.3f}", flush=True)
        yield curve


def final(curve: list[float]) -> float:
    """Mean of the last steps."""
    return mean(curve[-LAST:])


def interval(differences: list[float]) -> tuple[float, float]:
    """95% bootstrap interval of a mean."""
    random = Random(0)
    means = sorted(mean(random.choices(differences, k=len(differences))) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]


def sign_flip(differences: list[float]) -> float:
    """P-value of a mean at least as far from 0, if every difference's sign were random."""
    random, far = Random(0), abs(sum(differences)) - 1e-12
    flipped = (sum(random.choice((-d, d)) for d in differences) for _ in range(RESAMPLES))
    return (1 + sum(abs(total) >= far for total in flipped)) / (1 + RESAMPLES)


def compare(found: Rewards) -> dict[str, dict[str, Any]]:
    """Differences between the final rewards of every pair of heads."""
    pairs = {}
    for first, second in combinations(found, 2):
        both = zip(found[first], found[second], strict=True)
        differences = [final(a) - final(b) for a, b in both]
        pairs[f"{first} - {second}"] = {
            "mean": mean(differences),
            "interval_95": interval(differences),
            "p": sign_flip(differences),
        }
    return pairs


def table(task: str, found: Rewards) -> str:
    """A task's results in Markdown."""
    lines = [f"## {task}", "", f"| head | mean of the last {LAST} steps | sd | mean of all steps |"]
    lines.append("|---|---|---|---|")
    for head, seeds in found.items():
        finals = [final(curve) for curve in seeds]
        whole = mean(mean(curve) for curve in seeds)
        lines.append(f"| {head} | {mean(finals):.3f} | {stdev(finals):.3f} | {whole:.3f} |")
    lines += ["", "| difference | mean | 95% interval | p |", "|---|---|---|---|"]
    for pair, result in compare(found).items():
        low, high = result["interval_95"]
        row = f"| {pair} | {result['mean']:+.3f} | {low:+.3f} to {high:+.3f} | {result['p']:.4f} |"
        lines.append(row)
    return "\n".join(lines)


def plot(results: dict[str, Rewards], path: Path) -> None:
    """Mean over the seeds by step, with a band of two standard errors."""
    plt.rcParams["svg.hashsalt"] = "value head"
    figure, axes = plt.subplots(1, len(results), figsize=(5 * len(results), 3.6), squeeze=False)
    for axis, (task, found) in zip(axes[0], results.items()):
        for head, seeds in found.items():
            columns = list(zip(*seeds, strict=True))
            middle = [mean(column) for column in columns]
            error = [2 * stdev(column) / sqrt(len(column)) for column in columns]
            steps = range(1, len(middle) + 1)
            axis.plot(steps, middle, label=head)
            low, high = ([m + sign * e for m, e in zip(middle, error)] for sign in (-1, 1))
            axis.fill_between(steps, low, high, alpha=0.2)
        axis.set(title=task, xlabel="PPO step", ylabel="mean sampled reward", ylim=(0, 1))
        axis.legend(title="critic.value_head_init", loc="upper left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def write(results: dict[str, Rewards], seeds: int, out: Path) -> None:
    """Write curves, plot and table."""
    facts = conditions()
    rounded = {
        task: {
            head: [[round(r, 4) for r in curve] for curve in curves_]
            for head, curves_ in found.items()
        }
        for task, found in results.items()
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {
        **facts,
        "comparison": {t: compare(f) for t, f in results.items()},
        "rewards": rounded,
    }
    out.with_suffix(".json").write_text(json.dumps(report) + "\n")
    plot(results, out.with_suffix(".svg"))
    lines = [
        "# Initial value heads", "",
        f"`{facts['command']}`, {facts['date']}. {seeds} seeds. "
        "The rewards are those of the sampled responses; differences are within a seed.", "",
        f"![reward by step]({out.with_suffix('.svg').name})", "",
        "\n\n".join(table(task, found) for task, found in results.items()),
    ]  # fmt: skip
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--warm-start", type=int, default=120, help="steps of the warm start")
    heads = ["0", "inverse_hidden", "initializer_range"]
    parser.add_argument("--heads", nargs="+", default=heads)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--runs", type=Path, help="folder to keep the runs in")
    out = Path(__file__).parent / "results/value_head"
    parser.add_argument("--out", type=Path, default=out, help="without ending")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = (arguments.runs or Path(folder)).resolve()
        results: dict[str, Rewards] = {
            task: {head: [] for head in arguments.heads} for task in arguments.tasks
        }
        for seed in range(arguments.seeds):
            for task, found in results.items():
                curves = train_seed(task, seed, arguments, runs / f"{task}-{seed}")
                for head, curve in zip(arguments.heads, curves, strict=True):
                    found[head].append(curve)
    write(results, arguments.seeds, arguments.out)
    print(arguments.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    sys.exit(main())

"""Does the critic keep up: SAO on old samples and without its parts, and value pretraining.

    python benchmarks/critic_keeps_up.py [--seeds 0 1 2] [--steps 60] [--cases sao@8 ppo@8 ...]
        [--runs FOLDER] [--out FILE]

A model of two layers (width 64) reverses words; the reward comes with the last token, 1 if all of
the answer is right. Each seed draws a model and warms it up once; every case starts from it, with
the same prompts, and updates the actor once per step. ``@K``: each token was sampled K updates ago,
because the engine gets the weights of an update K updates late.

``sao`` is the preset, ``no_dis``, ``k1`` and ``no_freeze`` are it with PPO's clipped loss, with one
update of the critic per step, and with a critic that is trained as a whole. ``ppo`` is PPO (GAE of
lambda 0.95), ``no_dis`` and ``ppo`` take the ratio to the policy of the step, not to the older one
that sampled. Learning rates, batch and the first steps of the critic alone are the same for all,
and those of a tiny model, not the preset's. ``pretrained`` and ``fresh`` are one step of ``sao@0``
without the steps of the critic alone, with the critic of a value pretraining and without.

A finished run in ``--runs`` is not repeated. Writes ``<out>.json`` (reward and explained variance
of every step), ``<out>.svg`` and ``<out>.md``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from record import conditions
from torch import Tensor
from value_head import FINISHED, draw_model

import mppo.rollout.local.engine as local
from mppo.train import main as train
from mppo.weights.bucket import NamedTensors

SIZE = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
"""Of the model, which otherwise is ``builtin:tiny``."""
RECIPE = [
    "model.dtype=float32",
    "data.task=reverse",
    "data.task_kwargs={min_length: 1, max_length: 4, alphabet: abcd}",
    "data.max_prompt_length=16",
    "data.max_response_length=6",
    "data.train_batch_size=64",
    "data.val_size=4",
    "actor.ppo_mini_batch_size=64",
    "actor.ppo_micro_batch_size_per_gpu=64",
    "actor.optim.lr=3e-4",
    "critic.ppo_micro_batch_size_per_gpu=64",
    "critic.optim.lr=2e-3",
    "rollout.name=local",
    "rollout.batch_size=64",
    "trainer.warm_start_batch_size=32",
    "trainer.val_before_train=false",
    "trainer.logger=[jsonl]",
    "trainer.num_sample_generations=0",
]
WARM_START, ALONE, PRETRAINING = 220, 5, 100
"""Supervised steps before each case, steps of the critic alone, most steps of value pretraining."""
SAO = ["algorithm.preset=sao"]
OWN_RATIO = [
    "actor.policy_loss.loss_mode=vanilla", "algorithm.rollout_correction.bypass_mode=false",
    "actor.clip_ratio_low=0.2", "actor.clip_ratio_high=0.2",
]  # fmt: skip
KINDS = {
    "sao": SAO,
    "ppo": ["algorithm.adv_estimator=gae", "algorithm.lam=0.95"],
    "no_dis": [*SAO, *OWN_RATIO],
    "k1": [*SAO, "critic.ppo_epochs=1"],
    "no_freeze": [*SAO, "critic.freeze=[]"],
}
CASES = [
    "ppo@0", "sao@0", "sao@8", "ppo@8", "no_dis@8", "sao@4", "sao@1", "k1@8", "no_freeze@8",
]  # fmt: skip
STARTS = ("pretrained", "fresh")
BASE = "ppo@0"
"""The case that the others' rewards are compared with."""
SHOWN = {
    "by age": ["ppo@0", "sao@0", "sao@1", "sao@4", "sao@8", "ppo@8"],
    "without a part": ["sao@8", "no_dis@8", "k1@8", "no_freeze@8"],
}
"""The cases of each plot."""
LAST = 10
REWARD, EXPLAINED = "critic/score/mean", "critic/vf_explained_var"


@dataclass
class Curves:
    """What a case's runs logged in every step, by seed; None where it is undefined."""

    reward: list[list[float]] = field(default_factory=list)
    explained: list[list[float | None]] = field(default_factory=list)

    def add(self, rows: Sequence[dict[str, float]]) -> None:
        """Add the run of one more seed."""
        self.reward.append([round(row[REWARD], 4) for row in rows])
        known = [row.get(EXPLAINED) for row in rows]
        self.explained.append([None if x is None else round(x, 4) for x in known])


Found = dict[str, Curves]
"""By case."""


class LateEngine(local.LocalEngine):
    """The local engine with the weights of ``late`` updates ago."""

    late = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._kept: deque[tuple[list[list[tuple[str, Tensor]]], int]] = deque(maxlen=self.late + 1)

    def update_weights(self, buckets: Iterable[NamedTensors], version: int) -> None:
        """See ``LocalEngine``; the weights given are those of ``late`` calls later."""
        copied = [[(name, tensor.clone()) for name, tensor in bucket] for bucket in buckets]
        self._kept.append((copied, version))
        super().update_weights(*self._kept[0])


def rows_of(run: Path, seed: int, steps: int, settings: Sequence[str]) -> list[dict[str, float]]:
    """The metrics of every step of a run, trained unless it has finished."""
    if not (run / FINISHED).exists():
        shutil.rmtree(run, ignore_errors=True)
        code = train([
            "--quiet", *RECIPE, *settings, f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={run}", f"trainer.seed={seed}", f"data.seed={seed}",
        ])  # fmt: skip
        if code and not (run / "critic").exists():  # 1 if the gate of a value pretraining fails
            raise SystemExit(code)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / FINISHED).touch()
    return [row for row in rows if REWARD in row]


def warmed_up(seed: int, steps: int, place: Path) -> str:
    """The setting of the model that every case of a seed starts from."""
    if not (place / "warm" / FINISHED).exists():
        draw_model(seed, place / "model", SIZE)
    first = [f"model.path={place / 'model'}", f"trainer.warm_start_steps={steps}"]
    rows_of(place / "warm", seed, 1, [*first, *KINDS["ppo"], "trainer.export_hf=false"])
    return f"model.path={place / 'warm' / 'warm_start'}"


def run_case(
    case: str, seed: int, arguments: argparse.Namespace, place: Path
) -> list[dict[str, float]]:
    """The metrics of a case, one row per step."""
    model = warmed_up(seed, arguments.warm_start, place)
    kind, _, late = case.partition("@")
    LateEngine.late = int(late or 0)
    if kind not in STARTS:
        alone = f"trainer.critic_warmup={min(ALONE, arguments.steps)}"
        settings = [model, *KINDS[kind], alone, "trainer.export_hf=false"]
        return rows_of(place / case, seed, arguments.steps, settings)
    settings = [model, *SAO, "trainer.critic_warmup=0"]
    if kind == "pretrained":
        stage = ["trainer.stage=value_pretraining", "trainer.value_gate.explained_var=0.5"]
        rows_of(place / "values", seed, arguments.pretraining, [*settings, *stage])
        settings.append(f"critic.path={place / 'values' / 'critic'}")
    return rows_of(place / case, seed, 1, [*settings, "trainer.export_hf=false"])


def last(curve: Sequence[float]) -> float:
    """Mean of the last steps."""
    return mean(curve[-LAST:])


def spread(values: Sequence[float]) -> str:
    """Mean and, of several, standard deviation."""
    deviation = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{deviation}"


def table(found: Found) -> str:
    """The results in Markdown."""
    on_policy = [last(curve) for curve in found[BASE].reward] if BASE in found else []
    lines = [f"| case | seeds | reward, last {LAST} steps | over `{BASE}` | explained variance |"]
    lines.append("|---|---|---|---|---|")
    for case in (case for case in found if case not in STARTS):
        rewards = [last(curve) for curve in found[case].reward]
        over = f"{mean(rewards) / mean(on_policy):.2f}" if any(on_policy) else "-"
        known = [[x for x in curve[-LAST:] if x is not None] for curve in found[case].explained]
        explained = spread([mean(each) for each in known if each]) if any(known) else "-"
        lines.append(f"| `{case}` | {len(rewards)} | {spread(rewards)} | {over} | {explained} |")
    for case in (case for case in STARTS if case in found):
        numbers = [curve[0] for curve in found[case].explained]
        each = ", ".join("undefined" if x is None else f"{x:.2f}" for x in numbers)
        lines += ["", f"Explained variance at step 1, `{case}`, by seed: {each}."]
    return "\n".join(lines)


def plot(found: Found, path: Path) -> None:
    """Mean reward over the seeds by step: by age, and without each part."""
    plt.rcParams["svg.hashsalt"] = "critic"
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), sharey=True)
    for axis, (title, cases) in zip(axes, SHOWN.items()):
        for case in (case for case in cases if case in found):
            means = [mean(column) for column in zip(*found[case].reward)]
            smooth = [mean(means[max(0, end - 5) : end]) for end in range(1, len(means) + 1)]
            axis.plot(range(1, len(smooth) + 1), smooth, label=case)
        axis.set(title=title, xlabel="step", ylabel="mean sampled reward (5 steps)", ylim=(0, 1))
        axis.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def write(found: Found, seeds: Sequence[int], out: Path) -> None:
    """Write curves, plot and table."""
    facts = conditions()
    out.parent.mkdir(parents=True, exist_ok=True)
    cases = {case: asdict(curves) for case, curves in found.items()}
    text = json.dumps({**facts, "seeds": seeds, "cases": cases})
    out.with_suffix(".json").write_text(text + "\n")
    plot(found, out.with_suffix(".svg"))
    lines = [
        "# A critic that keeps up", "",
        f"`{facts['command']}`, {facts['date']}. Mean over the seeds ± standard deviation.", "",
        f"![reward by step]({out.with_suffix('.svg').name})", "", table(found),
    ]  # fmt: skip
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-start", type=int, default=WARM_START)
    parser.add_argument("--pretraining", type=int, default=PRETRAINING)
    known = [*STARTS, *CASES]
    parser.add_argument("--cases", nargs="+", default=known, choices=known)
    parser.add_argument("--runs", type=Path, help="folder to keep the runs in")
    out = Path(__file__).parent / "results/critic_keeps_up"
    parser.add_argument("--out", type=Path, default=out, help="without ending")
    arguments = parser.parse_args()
    local.LocalEngine = LateEngine
    found: Found = {case: Curves() for case in arguments.cases}
    with tempfile.TemporaryDirectory() as folder:
        runs = (arguments.runs or Path(folder)).resolve()
        for seed in arguments.seeds:
            for case in arguments.cases:
                rows = run_case(case, seed, arguments, runs / str(seed))
                found[case].add(rows)
                print(f"seed {seed}, {case}: {last([row[REWARD] for row in rows]):.3f}", flush=True)
    write(found, arguments.seeds, arguments.out)
    print(arguments.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    sys.exit(main())

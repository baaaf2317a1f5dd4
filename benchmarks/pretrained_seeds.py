"""PPO on a pretrained model over several seeds, against the untrained model at lower temperatures.

    python -m mppo.hub.smollm2 models/SmolLM2-135M-Instruct
    python benchmarks/pretrained_seeds.py [--model models/SmolLM2-135M-Instruct] [--seeds 0 1 2 3 4]
        [--runs FOLDER] [--out FILE]

SmolLM2-135M-Instruct adds or subtracts two numbers of one or two digits (``chain_sum`` of
reasoning-gym, scored by its own function, 1 for the right number and else 0). All seeds have the
same prompts, and the same 320 held-out ones, which are answered greedily. They differ in the value
head and in what is sampled.

The control is the model before training at other temperatures: training must beat what a colder
sampler gives for nothing. Every training run's difference to the untrained model's greedy answers
is judged by McNemar's exact test, on the problems that only one of the two solves.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from math import comb
from pathlib import Path
from statistics import mean, stdev

from record import parser, record

ROOT = Path(__file__).resolve().parents[1]
HELD_OUT, STEPS = 320, 24
TEMPERATURES = (0.25, 0.5, 1.0)
RECIPE = f"""
model: {{dtype: bfloat16}}
data:
  task: reasoning_gym:chain_sum
  task_kwargs: {{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2, allow_negation: false}}
  apply_chat_template: false
  max_prompt_length: 64
  max_response_length: 16
  train_batch_size: 36
  val_size: {HELD_OUT}
actor:
  ppo_mini_batch_size: 18
  ppo_micro_batch_size_per_gpu: 18
  optim: {{lr: 1.0e-5}}
critic:
  ppo_micro_batch_size_per_gpu: 18
  optim: {{lr: 2.0e-5}}
ref: {{ppo_micro_batch_size_per_gpu: 18}}
rollout: {{name: local, batch_size: 40}}
reward: {{verifier: reasoning_gym}}
algorithm: {{use_kl_in_reward: true, kl_ctrl: {{kl_coef: 0.002}}}}
trainer: {{total_training_steps: {STEPS}, val_before_train: false, test_freq: -1}}
"""
Right = list[bool]
"""Whether each held-out problem is solved."""


def torchrun(program: str, runs: Path, *settings: str) -> None:
    """Run a program of mppo on two processes."""
    recipe = runs / "recipe.yaml"
    recipe.write_text(RECIPE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [f"{ROOT}/mppo/{program}.py", "--config", str(recipe), *settings]
    subprocess.run(command, check=True, cwd=ROOT)


def evaluated(model: Path, file: Path, temperature: float = 0.0) -> Right:
    """Answers to the held-out problems, greedy unless a temperature is given; kept in ``file``."""
    if not file.exists():
        sampling = f"rollout.val_kwargs.temperature={temperature}"
        partly = file.with_suffix(".part")
        torchrun("evaluate", file.parent, "--samples", str(partly), f"model.path={model}", sampling)
        partly.rename(file)
    return [json.loads(line)["right"] for line in file.read_text().splitlines()]


def trained(model: Path, run: Path, seed: int) -> list[float]:
    """Train once; the mean reward of the sampled responses by step."""
    own = [f"trainer.seed={seed}", f"trainer.default_local_dir={run}"]
    if not (run / "actor").exists():
        torchrun("train", run.parent, f"model.path={model}", *own)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [round(row["critic/score/mean"], 4) for row in rows if "critic/score/mean" in row]


def mcnemar(before: Right, after: Right) -> dict[str, float]:
    """Problems that only one of two models solves, and the two-sided exact p-value."""
    lost = sum(b and not a for b, a in zip(before, after, strict=True))
    won = sum(a and not b for b, a in zip(before, after, strict=True))
    tail = sum(comb(lost + won, k) for k in range(min(lost, won) + 1)) / 2 ** (lost + won)
    return {"won": won, "lost": lost, "p": min(1.0, 2 * tail)}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, default=ROOT / "models/SmolLM2-135M-Instruct")
    arguments.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    arguments.add_argument("--runs", type=Path, help="folder to keep the runs in")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = (given.runs or Path(folder)).resolve()
        runs.mkdir(parents=True, exist_ok=True)
        model = given.model.resolve()
        before = evaluated(model, runs / "untrained.jsonl")
        colder = {
            str(t): mean(evaluated(model, runs / f"untrained_{t}.jsonl", t)) for t in TEMPERATURES
        }
        curves, after, tests = {}, {}, {}
        for seed in given.seeds:
            curves[seed] = trained(model, runs / f"seed{seed}", seed)
            right = evaluated(runs / f"seed{seed}/actor", runs / f"seed{seed}.jsonl")
            after[seed], tests[seed] = mean(right), mcnemar(before, right)
    scores = list(after.values())
    measured = {
        "held_out_problems": HELD_OUT,
        "untrained_greedy": mean(before),
        "untrained_by_temperature": colder,
        "trained_greedy": after,
        "trained_mean": mean(scores),
        "trained_standard_deviation": stdev(scores) if len(scores) > 1 else None,
        "against_untrained_greedy": tests,
        "sampled_reward": curves,
    }
    record(measured, given.out)


if __name__ == "__main__":
    main()

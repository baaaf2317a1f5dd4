"""Learning curves of mppo and of TRL's PPOTrainer, in all 17 metrics of TRL.

    make trl    # TRL 1.12, the last with a PPOTrainer, in a separate environment
    python benchmarks/trl_curves.py [--seeds 0 1 2 3 4] [--steps 40] [--out FILE]

Both start from the same folders (a Qwen2 of 64 characters with random weights, and a critic from
it), get the same prompts, and the same reward: the share of a response's ``RESPONSE_LENGTH``
positions with a character of the vocabulary's lower half. A response ends at ``<eos>``, so ending
early loses reward. mppo has ``algorithm.preset: trl``.

Sampling and the order of the prompts differ: compare means over seeds, not single steps. Means of
the last ``LAST`` steps agree if they differ by at most three standard errors over the seeds. TRL
averages some metrics over padding (docs/migrating.md), so they differ where responses end early,
and counts in ``val/num_eos_tokens`` also the ``<eos>`` that ``generate`` pads with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from math import hypot, sqrt
from pathlib import Path
from statistics import mean, variance
from typing import Any

from record import parser, record

ROOT = Path(__file__).resolve().parents[1]
TRL_PYTHON = ROOT / ".venv-trl/bin/python"
CHARACTERS, PROMPT_LENGTH, RESPONSE_LENGTH, BATCH, MINI_BATCHES, EPOCHS = 64, 8, 12, 64, 2, 2
FIRST = 33
"""The first character; each is one token."""
EOS, PAD = CHARACTERS, CHARACTERS + 1
"""Padding is no token of the model: PPOTrainer would take a sampled one for the end."""
SHARED = {"learning_rate": 1e-3, "kl_coef": 0.02, "temperature": 1.0}
SHAPE = dict(
    vocab_size=CHARACTERS + 1,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=128,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=EOS,
    pad_token_id=None,
)
LAST = 10
METRICS = (
    "objective/scores", "objective/kl", "objective/entropy", "objective/non_score_reward",
    "objective/rlhf_reward", "policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg",
    "loss/policy_avg", "loss/value_avg", "val/clipfrac_avg", "val/ratio", "val/ratio_var",
    "val/num_eos_tokens", "lr", "episode", "eps",
)  # fmt: skip
REWARD = f"""
def score(data_source, solution_str, ground_truth, extra_info):
    return sum(ord(each) < {FIRST + CHARACTERS // 2} for each in solution_str) / {RESPONSE_LENGTH}
"""
Rows = list[dict[str, float]]


def prepare(folder: Path) -> None:
    """Write actor, critic, tokenizer, prompts and reward of both systems."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2ForSequenceClassification,
    )

    torch.manual_seed(0)
    vocabulary = {chr(FIRST + i): i for i in range(CHARACTERS)} | {"<eos>": EOS, "<pad>": PAD}
    characters = Tokenizer(models.BPE(vocabulary, []))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    characters.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )
    for name, kind in (("actor", Qwen2ForCausalLM), ("critic", Qwen2ForSequenceClassification)):
        kind(Qwen2Config(**SHAPE, num_labels=1)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    ids = torch.randint(0, CHARACTERS, (BATCH * 16, PROMPT_LENGTH)).tolist()
    rows = [json.dumps({"prompt": "".join(chr(FIRST + i) for i in row)}) for row in ids]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "reward.py").write_text(REWARD)


def mppo_run(folder: Path, seed: int, steps: int) -> Rows:
    """Train with mppo on one process."""
    run = folder / f"mppo{seed}"
    settings = [
        "algorithm.preset=trl",
        f"model.path={folder}/actor",
        "model.dtype=float32",
        f"critic.path={folder}/critic",
        f"data.train_files=[{folder}/prompts.jsonl]",
        "data.prompt_key=prompt",
        "data.answer_key=null",
        "data.apply_chat_template=false",
        f"data.train_batch_size={BATCH}",
        f"data.max_prompt_length={PROMPT_LENGTH}",
        f"data.max_response_length={RESPONSE_LENGTH}",
        f"data.seed={seed}",
        f"actor.ppo_mini_batch_size={BATCH // MINI_BATCHES}",
        f"actor.ppo_epochs={EPOCHS}",
        f"critic.ppo_epochs={EPOCHS}",
        f"actor.ppo_micro_batch_size_per_gpu={BATCH}",
        f"critic.ppo_micro_batch_size_per_gpu={BATCH}",
        f"ref.ppo_micro_batch_size_per_gpu={BATCH}",
        f"actor.optim.lr={SHARED['learning_rate']}",
        f"critic.optim.lr={SHARED['learning_rate']}",
        f"algorithm.kl_ctrl.kl_coef={SHARED['kl_coef']}",
        "reward.name=function",
        f"reward.function={folder}/reward.py:score",
        "rollout.name=local",
        f"rollout.temperature={SHARED['temperature']}",
        f"rollout.batch_size={BATCH}",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.export_hf=false",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={run}",
        f"trainer.seed={seed}",
    ]
    command = [sys.executable, str(ROOT / "mppo/train.py"), "--quiet", *settings]
    subprocess.run(command, check=True, cwd=ROOT)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def trl_run(folder: Path, seed: int, steps: int, python: Path) -> Rows:
    """Train with TRL in its own environment."""
    out = folder / f"trl{seed}.jsonl"
    if not out.exists():
        command = [str(python), __file__, "--worker", str(folder), "--seeds", str(seed)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        subprocess.run([*command, "--steps", str(steps)], check=True, env=environment)
    return [json.loads(line) for line in out.read_text().splitlines()]


def trl_worker(folder: Path, seed: int, steps: int) -> None:
    """TRL's trainer; writes what it logs."""
    from types import SimpleNamespace

    import torch
    from datasets import Dataset
    from transformers import (
        AutoTokenizer,
        Qwen2ForCausalLM,
        Qwen2ForSequenceClassification,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    class LowCharacters(torch.nn.Module):
        """Share of positions so far with a character of the lower half, as a reward model."""

        base_model_prefix = "backbone"

        def __init__(self) -> None:
            super().__init__()
            self.score = torch.nn.Identity()

        def backbone(self, input_ids, attention_mask, **_):
            low = (input_ids < CHARACTERS // 2) & attention_mask.bool()
            low[:, :PROMPT_LENGTH] = False
            return SimpleNamespace(hidden_states=[(low.cumsum(1) / RESPONSE_LENGTH)[..., None]])

    class Log(TrainerCallback):
        def on_log(self, *_, logs, **__):
            with (folder / f"trl{seed}.part").open("a") as file:
                file.write(json.dumps(logs) + "\n")

    tokenizer = AutoTokenizer.from_pretrained(folder / "actor")
    prompts = (folder / "prompts.jsonl").read_text().splitlines()
    ids = [tokenizer(json.loads(row)["prompt"])["input_ids"] for row in prompts]
    (folder / f"trl{seed}.part").unlink(missing_ok=True)
    PPOTrainer(
        args=PPOConfig(
            output_dir=str(folder / f"trl{seed}"), per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=1, num_mini_batches=MINI_BATCHES,
            num_ppo_epochs=EPOCHS, local_rollout_forward_batch_size=BATCH,
            response_length=RESPONSE_LENGTH, stop_token="eos", total_episodes=BATCH * steps,
            num_sample_generations=0, report_to="none", use_cpu=True, bf16=False,
            save_strategy="no", eval_strategy="no", disable_tqdm=True, logging_steps=1,
            gradient_checkpointing=False, seed=seed, **SHARED,
        ),
        processing_class=tokenizer,
        model=Qwen2ForCausalLM.from_pretrained(folder / "actor", dtype=torch.float32),
        ref_model=Qwen2ForCausalLM.from_pretrained(folder / "actor", dtype=torch.float32),
        reward_model=LowCharacters(),
        value_model=Qwen2ForSequenceClassification.from_pretrained(
            folder / "critic", dtype=torch.float32
        ),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        callbacks=[Log()],
    ).train()  # fmt: skip
    (folder / f"trl{seed}.part").rename(folder / f"trl{seed}.jsonl")


def laid_over(runs: dict[str, list[Rows]], name: str) -> dict[str, Any]:
    """Mean over seeds by step of one metric, and whether the ends of the two systems agree."""
    curves, ends = {}, {}
    for system, seeds in runs.items():
        values = [[row[name] for row in rows if name in row] for rows in seeds]
        curves[system] = [float(f"{mean(step):.5g}") for step in zip(*values, strict=True)]
        ends[system] = [mean(each[-LAST:]) for each in values]
    found = {
        "last": {system: mean(each) for system, each in ends.items()},
        "standard_error": {s: sqrt(variance(v) / len(v)) for s, v in ends.items() if len(v) > 1},
        "curves": curves,
    }
    if len(found["standard_error"]) == 2:
        gap = abs(mean(ends["mppo"]) - mean(ends["trl"]))
        found["agree"] = gap <= 3 * hypot(*found["standard_error"].values()) + 1e-9
    return found


def plot(found: dict[str, dict[str, Any]], path: Path) -> None:
    """A panel for each metric."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(4, 5, figsize=(16, 10))
    for axes, (name, numbers) in zip(panels.flat, found.items()):
        for system, curve in numbers["curves"].items():
            axes.plot(range(1, len(curve) + 1), curve, label=system, linewidth=1)
        axes.set_title(name, fontsize=9)
    for axes in panels.flat[len(found) :]:
        axes.axis("off")
    panels.flat[0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    arguments.add_argument("--steps", type=int, default=40)
    arguments.add_argument("--runs", type=Path, help="folder to keep the runs in")
    arguments.add_argument("--trl-python", type=Path, default=TRL_PYTHON)
    arguments.add_argument("--without-trl", action="store_true", help="train only with mppo")
    arguments.add_argument("--worker", type=Path, help="(the part that runs in TRL's environment)")
    given = arguments.parse_args()
    if given.worker:
        trl_worker(given.worker, given.seeds[0], given.steps)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.runs or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder)
        runs = {"mppo": [mppo_run(folder, seed, given.steps) for seed in given.seeds]}
        if not given.without_trl:
            python = given.trl_python
            runs["trl"] = [trl_run(folder, seed, given.steps, python) for seed in given.seeds]
    found = {name: laid_over(runs, name) for name in METRICS}
    record({"seeds": given.seeds, "steps": given.steps, "metrics": found}, given.out)
    if given.out:
        plot(found, given.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()

"""One PPO step of mppo and of TRL's PPOTrainer, alternating in one run on the same machine.

Same model (Qwen2, hidden 256, 4 layers, vocabulary 1024, random weights), same 32 prompts of 32
random tokens, 32 response tokens each, one epoch, two mini-batches, same dtype, same cores. TRL's
reward model is negligible (hidden 8); mppo's reward is a count. On both sides actor, critic and
reference are separate models, KL is in the reward, and the old log-probabilities are those of the
generation (mppo: ``bypass_mode``; TRL has no other mode).

    make trl    # TRL 1.12, the last with a PPOTrainer, in a separate environment
    python benchmarks/ppo_step.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

PROMPTS, PROMPT_LENGTH, RESPONSE_LENGTH, VOCAB = 32, 32, 32, 1024
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    intermediate_size=1024,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    pad_token_id=VOCAB - 1,
    bos_token_id=None,
)
TOKENS = PROMPTS * (PROMPT_LENGTH + RESPONSE_LENGTH)
HERE = Path(__file__).resolve().parent
TRL_PYTHON = HERE.parent / ".venv-trl/bin/python"


class Worker:
    """A group of processes that run one step per command."""

    def __init__(self, commands: list[list[str]], environments: list[dict[str, str]]) -> None:
        self.processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **environment, "PYTHONWARNINGS": "ignore"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for command, environment in zip(commands, environments)
        ]
        for process in self.processes:
            self._answer(process)

    def _answer(self, process: subprocess.Popen) -> dict:
        for line in process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise SystemExit(f"worker died: {' '.join(process.args)}; run it alone to see why")

    def step(self) -> dict:
        """Run one step in all processes; the first one's answer, with the wall-clock seconds."""
        start = time.perf_counter()
        for process in self.processes:
            process.stdin.write("step\n")
            process.stdin.flush()
        answers = [self._answer(process) for process in self.processes]
        return answers[0] | {"seconds": time.perf_counter() - start}

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def say(**answer) -> None:
    """Answer the driver."""
    print("@" + json.dumps(answer), flush=True)


def mppo_settings(folder: str, dtype: str) -> list[str]:
    """The recipe of the mppo side."""
    return [
        f"model.path={folder}",
        f"model.dtype={dtype}",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_response_length={RESPONSE_LENGTH}",
        f"actor.ppo_mini_batch_size={PROMPTS // 2}",
        f"actor.ppo_micro_batch_size_per_gpu={PROMPTS}",
        "actor.optim.lr=1e-5",
        f"critic.ppo_micro_batch_size_per_gpu={PROMPTS}",
        f"ref.ppo_micro_batch_size_per_gpu={PROMPTS}",
        "algorithm.use_kl_in_reward=true",
        "algorithm.rollout_correction.bypass_mode=true",
        "algorithm.lam=0.95",
        "trainer.sample_table_rows=0",
    ]


def mppo_worker(folder: str, dtype: str) -> None:
    """Rank of an mppo run: DP over the ranks, one thread each."""
    import torch

    from mppo.parallel import device

    device.prepare_megatron()
    from transformers import AutoConfig

    from mppo.algos.reward_normalization import RewardStats
    from mppo.batch.prompt import Prompt
    from mppo.checkpoint.checkpointer import Checkpointer
    from mppo.data.loader import PromptLoader
    from mppo.data.source import PromptSet
    from mppo.parallel.groups import GroupRegistry
    from mppo.parallel.launch import discover
    from mppo.parallel.process_group import process_group
    from mppo.recipe.load import load_recipe
    from mppo.rollout.build import build_engine
    from mppo.supervision.stop_request import StopRequest
    from mppo.trainer.advantages import kl_controller
    from mppo.trainer.loop import iterate, sync_weights
    from mppo.trainer.run import Run
    from mppo.trainer.run_roles import Roles
    from mppo.trainer.start.user_parts import Callbacks

    recipe = load_recipe(None, mppo_settings(folder, dtype))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB - 2, (PROMPTS * 64, PROMPT_LENGTH), generator=generator).tolist()
    prompts = PromptSet(tuple(Prompt(i, tuple(row), "bench", "", "") for i, row in enumerate(ids)))

    info = discover()
    with process_group(info, timeout_s=600):
        config = AutoConfig.from_pretrained(folder)
        engine = build_engine(recipe, Path(folder), config, Path(folder))
        run = Run(
            recipe=recipe,
            tokenizer=None,
            prompts=PromptLoader(prompts, PROMPTS, shuffle=False, seed=0),
            validation=PromptSet(()),
            engine=engine,
            scorer=CountScorer(),
            roles=Roles(recipe, Path(folder), lambda path: config, GroupRegistry(), 100),
            kl=kl_controller(recipe.algorithm.kl_ctrl),
            reward_stats=RewardStats(),
            checkpoints=Checkpointer(
                recipe.trainer,
                Path(folder) / "checkpoints",
                {},
                {},
                {},
                StopRequest(),
                print,
            ),
            reporter=None,
            folder=None,
            total_steps=1 << 30,
            callbacks=Callbacks(),
        )
        sync_weights(run, version=0)
        say(ready=True)
        step = 1  # no sample tables, as in steps 1 and total
        for _ in sys.stdin:
            step += 1
            run.seconds.clear()
            iterate(run, step)
            say(phases=run.seconds)


class CountScorer:
    """The part of ``mppo.rewards.scorer.Scorer`` that a step uses."""

    def raw_scores(self, episodes):
        from mppo.batch.score import ResponseScore

        return [ResponseScore((each.prompt.uid + each.length) % 7 / 7) for each in episodes]

    score = raw_scores_divided = raw_scores
    finish_scores = staticmethod(lambda scores, episodes: scores)


def trl_settings() -> dict:
    """Arguments of PPOConfig on the TRL side."""
    return dict(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=PROMPTS,
        gradient_accumulation_steps=1,
        num_mini_batches=2,
        num_ppo_epochs=1,
        local_rollout_forward_batch_size=PROMPTS,
        response_length=RESPONSE_LENGTH,
        total_episodes=PROMPTS * 64,
        temperature=1.0,
        kl_coef=0.001,
        lam=0.95,
        learning_rate=1e-5,
        num_sample_generations=0,
        report_to="none",
        use_cpu=True,
        bf16=False,
        fp16=False,
        save_strategy="no",
        eval_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        seed=0,
    )


def trl_worker(folder: str, dtype: str) -> None:
    """TRL's trainer, paused between steps."""
    os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2ForSequenceClassification,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    vocab = {f"t{i}": i for i in range(VOCAB - 2)} | {"<eos>": VOCAB - 2, "<pad>": VOCAB - 1}
    words = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )
    kind = getattr(torch, dtype)
    policy = Qwen2ForCausalLM.from_pretrained(folder, dtype=kind)
    reference = Qwen2ForCausalLM.from_pretrained(folder, dtype=kind)
    shape = SHAPE | {"eos_token_id": VOCAB - 2, "num_labels": 1}
    value = Qwen2ForSequenceClassification(Qwen2Config(**shape)).to(kind)
    small = dict(hidden_size=8, num_hidden_layers=1, intermediate_size=8)
    heads = dict(num_attention_heads=1, num_key_value_heads=1)
    reward = Qwen2ForSequenceClassification(Qwen2Config(**(shape | small | heads))).to(kind)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB - 2, (PROMPTS * 64, PROMPT_LENGTH), generator=generator).tolist()

    class Pause(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            say(ready=True)
            sys.stdin.readline()

        def on_step_end(self, *args, **kwargs):
            say()
            if not sys.stdin.readline():
                sys.exit(0)

    PPOTrainer(
        args=PPOConfig(**trl_settings()),
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        callbacks=[Pause()],
    ).train()


def matmul_peak(dtype: str, cores: int) -> float:
    """Measured GFLOP/s of a 2048-cubed matrix multiply on ``cores`` threads, best of ten.

    In float32 where the processor has no instructions for ``dtype``.
    """
    import torch

    from mppo.rollout.local.local_engine import compute_dtype

    torch.set_num_threads(cores)
    kind = compute_dtype(getattr(torch, dtype), torch.device("cpu"))
    a = torch.randn(2048, 2048, dtype=kind)
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * 2048**3 / best / 1e9


def step_flops() -> float:
    """Multiply-adds of one step, twice: two forward passes, two updates, one generation.

    Matrix multiplies by weights only; the vocabulary projection on response tokens.
    """
    h, f = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    trunk = 2 * SHAPE["num_hidden_layers"] * (4 * h * h + 3 * h * f) * TOKENS
    head = 2 * h * VOCAB * PROMPTS * RESPONSE_LENGTH
    forwards = 2 * trunk + head
    updates = 2 * 3 * trunk + 4 * head
    return forwards + updates + trunk + head


def start(python: str, name: str, folder: str, dtype: str, ranks: int, cores: int) -> Worker:
    """Start a worker of ``ranks`` processes that share ``cores``."""
    from mppo.parallel.addresses import free_port  # TRL's Python has no mppo

    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": str(cores // ranks),
    }
    command = [python, str(HERE / "ppo_step.py"), "--worker", name, folder, "--dtype", dtype]
    each = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return Worker([command] * ranks, each)


def compare(arguments: argparse.Namespace, dtype: str, folder: str) -> dict:
    """Run the two alternately and summarise."""
    workers = {"mppo": start(sys.executable, "mppo", folder, dtype, 2, arguments.cores)}
    if not arguments.without_trl:
        workers["trl"] = start(str(arguments.trl_python), "trl", folder, dtype, 1, arguments.cores)
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    phases: dict[str, list[float]] = {}
    for step in range(arguments.steps + arguments.warm_up):
        for name, worker in workers.items():
            answer = worker.step()
            if step >= arguments.warm_up:
                seconds[name].append(answer["seconds"])
                for phase, value in answer.get("phases", {}).items():
                    phases.setdefault(phase, []).append(value)
    for worker in workers.values():
        worker.close()
    peak = matmul_peak(dtype, arguments.cores)
    best = {name: min(values) for name, values in seconds.items()}
    result = {
        "dtype": dtype,
        "seconds_min": best,
        "seconds_median": {k: statistics.median(v) for k, v in seconds.items()},
        "tokens_per_second": {k: TOKENS / v for k, v in best.items()},
        "matmul_peak_gflops": peak,
        "matmul_share_of_peak": step_flops() / best["mppo"] / 1e9 / peak,
        "mppo_phases_seconds_min": {k: min(v) for k, v in phases.items()},
    }
    if "trl" in best:
        paired = [t / m for t, m in zip(seconds["trl"], seconds["mppo"])]
        result["trl_over_mppo_min"] = best["trl"] / best["mppo"]
        result["trl_over_mppo_median_of_pairs"] = statistics.median(paired)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trl-python", type=Path, default=TRL_PYTHON, help="interpreter with trl==1.12.0"
    )
    parser.add_argument("--without-trl", action="store_true", help="measure only mppo")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, folder = arguments.worker
        {"mppo": mppo_worker, "trl": trl_worker}[name](folder, arguments.dtype)
        return
    if not arguments.without_trl and not arguments.trl_python.exists():
        parser.error(f"{arguments.trl_python} is missing: make trl, or give --without-trl")
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(**SHAPE, eos_token_id=None)).save_pretrained(folder)
        results = [compare(arguments, dtype, folder) for dtype in arguments.dtypes]
    report = {
        "date": date.today().isoformat(),
        "command": "python " + " ".join(["benchmarks/ppo_step.py", *sys.argv[1:]]),
        "cores": arguments.cores,
        "torch": torch.__version__,
        "results": results,
    }
    print(json.dumps(report, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

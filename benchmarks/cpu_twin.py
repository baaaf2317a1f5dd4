"""Predicted seconds of a run on this machine's processor, beside its measured ones.

    python benchmarks/cpu_twin.py [--repeat N] [--rounds N] [--out FILE]

The formulas that predict a step on GPUs (``mppo.planning.time``) get the seconds of this
processor's kernels instead, measured by two processes at the same time, as two ranks compute. Two
factors are not computed but fitted, as for GPUs: on the first layout. The other layouts judge, so
the mechanism is tested against truth: splitting by tensor, pipeline and data parallelism,
micro-batches, the schedule, lengths. All layouts, then all kernels, are measured in every round,
and the least of the rounds counts for both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from record import parser, record
from transformers import AutoConfig, AutoModelForCausalLM

import mppo
from mppo.hub.builtin import MODELS, byte_tokenizer
from mppo.planning.time.kernels import Collective, GpuSystem
from mppo.planning.time.recipe import recipe_load, recipe_sequences
from mppo.planning.time.step import predict_step

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
SIZE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
}
PROMPT, RESPONSE, SEQUENCES = 128, 128, 16
BASE = [
    "model.dtype=float32",
    "data.task=reverse",
    f"data.max_prompt_length={PROMPT}",
    f"data.max_response_length={RESPONSE}",
    f"data.train_batch_size={SEQUENCES}",
    "data.train_size=256",
    f"actor.ppo_mini_batch_size={SEQUENCES // 2}",
    "actor.ppo_micro_batch_size_per_gpu=4",
    "critic.ppo_micro_batch_size_per_gpu=4",
    "rollout.name=local",
    f"rollout.batch_size={SEQUENCES}",
    "trainer.val_before_train=false",
    "trainer.export_hf=false",
    "trainer.logger=[jsonl]",
    "trainer.num_sample_generations=0",
    "trainer.save_freq=-1",
]
TP, PP, VPP = (
    f"megatron.{name}"
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
    )
)


def both(*settings: str) -> list[str]:
    """Settings of actor and critic."""
    return [f"{role}.{setting}" for role in ("actor", "critic") for setting in settings]


LAYOUTS = {
    "DP2": [],
    "TP2": both(f"{TP}=2"),
    "PP2": both(f"{PP}=2"),
    "PP2 x VPP2": both(f"{PP}=2", f"{VPP}=2"),
    "DP2, micro-batches of 8": both("ppo_micro_batch_size_per_gpu=8"),
    "PP2, one role after the other": [*both(f"{PP}=2"), "trainer.schedule=sequential"],
}
"""The first one fits the factors, the others judge."""
MEASURED = {
    "generation": "timing_s/gen",
    "log-probabilities and values": "timing_s/log_probs",
    "update": "timing_s/update",
}
"""The run's metric of each predicted phase."""
TOGETHER = {
    "old log-probabilities": "log-probabilities and values",
    "values": "log-probabilities and values",
}
"""Predicted phases that a pipeline computes together."""
LENGTHS = ("prompt_length/mean", "response_length/mean")
PRODUCTS = 4
"""Exchanges are measured so many in a row, each after a product."""
GRAIN = 32
"""Contexts of decoding are measured in multiples of this."""
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc_per_node={RANKS}"]  # fmt: skip


class ProcessorKernels:
    """Seconds of kernels in float32 on this machine, measured by all ranks at the same time.

    Every rank calls the same methods in the same order.

    Args:
        repeat: how often each is measured.
    """

    source = "this processor"

    def __init__(self, repeat: int) -> None:
        self._repeat = repeat
        self._known: dict[tuple[Any, ...], float] = {}
        x, square = torch.randn(8 << 20), torch.randn(1024, 1024)
        # the formulas count bytes of bfloat16, half of those that float32 has
        memory = x.numel() * 4 / self._seconds(lambda: x.mul_(1.0))
        flops = 2 * 1024**3 / self._seconds(lambda: square @ square)
        self.system = GpuSystem(
            *("processor", flops, memory, RANKS, memory / 2, memory / 2, memory / 2, 1e-4),
            beside=False,
        )

    def gemm(self, m: int, n: int, k: int) -> float:
        a, b = torch.randn(m, k), torch.randn(k, n)
        return self._once(("gemm", m, n, k), lambda: a @ b)

    def attention(self, batch: int, length: int, heads: int, kv_heads: int, dim: int) -> float:
        q, k, v = (torch.randn(batch, n, length, dim) for n in (heads, kv_heads, kv_heads))
        key = ("attention", batch, length, heads, kv_heads, dim)
        return self._once(key, lambda: _attention(q, k, v, is_causal=True))

    def decode(self, batch: int, context: int, heads: int, kv_heads: int, dim: int) -> float:
        context = -(-context // GRAIN) * GRAIN
        q = torch.randn(batch, heads, 1, dim)
        k, v = (torch.randn(batch, kv_heads, context, dim) for _ in range(2))
        key = ("decode", batch, context, heads, kv_heads, dim)
        return self._once(key, lambda: _attention(q, k, v))

    def latent_decode(self, batch: int, context: int, heads: int) -> float:
        raise NotImplementedError("the model has no latent attention")

    def experts(self, tokens: int, hidden: int, width: int, active: int, experts: int, tp: int,
                ep: int) -> float:  # fmt: skip
        raise NotImplementedError("the model has no experts")

    def collective(self, kind: Collective, nbytes: float, ranks: int) -> float:
        if kind == "all_gather":  # the formulas take scatters for gathers, which gloo does not
            scatter = self.collective("reduce_scatter", 2 * nbytes, ranks)
            return (scatter + self._collective(kind, nbytes, ranks)) / 2
        return self._collective(kind, nbytes, ranks)

    def _collective(self, kind: Collective, nbytes: float, ranks: int) -> float:
        # gradients are float32 in the formulas too, all else bfloat16
        elements = int(nbytes / (4 if kind == "reduce_scatter" else 2)) // ranks * ranks
        whole, part = torch.zeros(elements), torch.zeros(elements // ranks)
        works: Mapping[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        }
        key = (kind, elements)
        if key not in self._known:
            self._known[key] = self._exchange(works[kind])
        return self._known[key]

    def _exchange(self, work: Callable[[], object]) -> float:
        """Seconds of an exchange between products, as a run has it: with the wait for the slower
        rank, which an exchange after a barrier has not."""
        square = torch.randn(512, 512)

        def products(between: Callable[[], object]) -> None:
            for _ in range(PRODUCTS):
                square @ square
                between()

        added = self._seconds(lambda: products(work)) - self._seconds(lambda: products(int))
        return max(added / PRODUCTS, self._seconds(work))

    def _once(self, key: tuple[Any, ...], work: Callable[[], object]) -> float:
        if key not in self._known:
            self._known[key] = self._seconds(work)
        return self._known[key]

    def _seconds(self, work: Callable[[], object]) -> float:
        """The slower rank's least: other programs of the machine only add to it."""
        work()
        times: list[float] = []
        for _ in range(self._repeat):
            dist.barrier()
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        slowest = torch.tensor(min(times))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: bool) -> torch.Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **options)


def write_model(folder: Path, hidden: int) -> None:
    """Write a model of a width with random weights."""
    fields = {**MODELS["tiny"], **SIZE, "hidden_size": hidden, "intermediate_size": 3 * hidden}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def run(settings: Sequence[str], folder: Path, steps: int) -> dict[str, float]:
    """Metrics of a run on two processes: of seconds the least of its steps without the first."""
    ours = [f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={folder}"]
    command = [*LAUNCHER, str(ROOT / "mppo/train.py"), *settings, *ours]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [line for line in map(json.loads, lines) if "timing_s/step" in line][1:]
    return {
        **{name: min(line[name] for line in found) for name in MEASURED.values()},
        **{name: median(line[name] for line in found) for name in LENGTHS},
    }


def predict(cases: Path, repeat: int) -> None:
    """Print the predicted seconds of the phases of each case. Collective."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kernels = ProcessorKernels(repeat)
    found: list[dict[str, float]] = []
    for case in json.loads(cases.read_text()):
        plan = mppo.plan(mppo.load({}, *case["settings"]), RANKS)
        sequences = recipe_sequences(plan.recipe, case["prompt"], case["response"])
        load = recipe_load(plan.recipe, plan.plans, None, plan.hf_configs, sequences)
        seconds = dict.fromkeys(MEASURED, 0.0)
        for phase in predict_step(load, kernels).phases:
            name = phase.name.split(" of ")[0]  # "update of actor and critic"
            name = TOGETHER.get(name, name)
            if name in seconds:
                seconds[name] += phase.seconds
        found.append(seconds)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


Seconds = list[dict[str, float]]
"""Of the phases, by layout."""


def one_round(folder: Path, arguments: argparse.Namespace) -> tuple[Seconds, Seconds]:
    """What the phases of every layout take, and what they are predicted to take."""
    cases: list[dict[str, Any]] = []
    measured: Seconds = []
    for number, name in enumerate(arguments.layouts):
        settings = [*BASE, *LAYOUTS[name], f"model.path={folder.parent / 'model'}"]
        measured.append(run(settings, folder / str(number), arguments.steps))
        prompt, response = (measured[-1][name] for name in LENGTHS)
        cases.append({"settings": settings, "prompt": prompt, "response": response})
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    command = [*LAUNCHER, __file__, "--predict", str(file), "--repeat", str(arguments.repeat)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return measured, json.loads(printed.splitlines()[-1])


def least(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The least of every number."""
    return {name: min(one[name] for one in rounds) for name in rounds[0]}


def compare(
    layouts: Sequence[str],
    measured: Sequence[Mapping[str, float]],
    predicted: Sequence[Mapping[str, float]],
) -> dict[str, Any]:
    """Predicted over measured seconds by layout and phase, with the factors of the first layout."""
    took = [{phase: one[name] for phase, name in MEASURED.items()} for one in measured]
    training = [phase for phase in MEASURED if phase != "generation"]
    factors = {"generation": took[0]["generation"] / predicted[0]["generation"]}
    trained = sum(took[0][phase] for phase in training)
    factors["training"] = trained / sum(predicted[0][phase] for phase in training)
    rows: dict[str, Any] = {}
    for layout, real, seconds in zip(layouts, took, predicted, strict=True):
        rows[layout] = {
            phase: {
                "measured_s": round(real[phase], 3),
                "predicted_over_measured": round(
                    seconds[phase] * factors.get(phase, factors["training"]) / real[phase], 2
                ),
            }
            for phase in MEASURED
        }
    return {"factors": {name: round(value, 2) for name, value in factors.items()}, "layouts": rows}


def main() -> None:
    made = parser(__doc__ or "", repeat=7)
    made.add_argument("--steps", type=int, default=6)
    made.add_argument("--rounds", type=int, default=1)
    made.add_argument("--hidden", type=int, default=512, help="width of the model")
    made.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS])
    made.add_argument("--predict", type=Path, metavar="CASES", help="for the benchmark's own ranks")
    arguments = made.parse_args()
    if arguments.predict:
        predict(arguments.predict, arguments.repeat)
        return
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        write_model(place / "model", arguments.hidden)
        rounds = [one_round(place / str(number), arguments) for number in range(arguments.rounds)]
    measured, predicted = ([*map(least, zip(*each, strict=True))] for each in zip(*rounds))
    record(compare(arguments.layouts, measured, predicted), arguments.out)


if __name__ == "__main__":
    main()

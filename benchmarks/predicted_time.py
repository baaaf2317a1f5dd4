"""Predicted seconds of published RL steps, beside the published ones.

    python benchmarks/predicted_time.py [--out FILE]

The rows are steps that other systems published with their hardware, layout and lengths. mppo's
formulas predict them with those layouts, and without a critic where the system has none. The rows
marked "fit" are those on which the two constants are chosen (``ENGINE`` and ``TRAINER`` of
``mppo.planning.time``); the others judge. In a step of a run one step ahead the longer of
generation and training is the step, so each such row fixes one constant: two that of the engine,
one that of the trainer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import record
from transformers import AutoConfig

from mppo.batch.microbatches import MicroBatchLimits
from mppo.parallel.layout import Layout
from mppo.planning.flops import model_flops
from mppo.planning.memory import (
    count_parameters,
    experts_per_token,
    model_parameters,
    stage_layers,
)
from mppo.planning.time.generation_time import ENGINE, Servers
from mppo.planning.time.library import open_library
from mppo.planning.time.role_load import TRAINER, RoleLoad, StepSequences
from mppo.planning.time.step import Prediction, StepLoad, predict_step
from mppo.recipe.gpu_types import find_gpu
from mppo.recipe.model_shape import model_shape
from mppo.recipe.sections.role_config import Head
from mppo.weights.table import parameter_table

NEMO = "NeMo-RL 0.7, docs/about/performance-summary.md"
PROMPT = 110
"""Mean tokens of a prompt, as it follows from the rows' tokens per second."""

_LLAMA: dict[str, Any] = {"vocab_size": 32000, "num_hidden_layers": 32, "hidden_size": 4096,
    "intermediate_size": 11008, "num_attention_heads": 32}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {**_LLAMA, "model_type": "llama", "vocab_size": 128256,
        "intermediate_size": 14336, "num_key_value_heads": 8},
    "Qwen3-32B": {"model_type": "qwen3", "vocab_size": 151936, "num_hidden_layers": 64,
        "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128},
    "Qwen3-30B-A3B": {"model_type": "qwen3_moe", "vocab_size": 151936, "num_hidden_layers": 48,
        "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768},
    "Qwen3-235B-A22B": {"model_type": "qwen3_moe", "vocab_size": 151936, "num_hidden_layers": 94,
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536},
    "DeepSeek-V3": {"model_type": "deepseek_v3", "vocab_size": 129280, "num_hidden_layers": 61,
        "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "num_nextn_predict_layers": 0},
}  # fmt: skip


ONE_PASS = ("ref",)
"""Passes before the update where its first ratio is taken as 1 (``force_on_policy_ratio``)."""


@dataclass(frozen=True)
class Row:
    """A published step.

    Args:
        source: where.
        model: the model.
        gpu: the type of GPU.
        gpus: number of GPUs, those of generation included.
        prompt, mean, longest: tokens of a prompt and of a response.
        batch: sequences generated in a step.
        mini_batch: sequences of an optimizer step.
        samples: responses of a prompt.
        generation: TP of a server.
        training: TP, CP, EP, PP.
        packed: tokens of a micro-batch in training.
        measured: the same in forward-only passes.
        seconds: published seconds.
        ahead: generation and training run beside each other, each on half of the GPUs.
        recomputes: the backward pass repeats the forward pass.
        passes: roles that pass over the sequences before the update.
    """

    source: str
    model: str
    gpu: str
    gpus: int
    prompt: int
    mean: int
    longest: int
    batch: int
    mini_batch: int
    samples: int
    generation: int
    training: tuple[int, int, int, int]
    packed: int
    measured: int
    seconds: float
    ahead: bool = False
    recomputes: bool = False
    passes: tuple[str, ...] = ("actor", "ref")

    @property
    def fitted(self) -> bool:
        """Whether the constants are chosen on it."""
        return self.ahead


def _nemo(
    model: str,
    gpus: int,
    mean: int,
    longest: int,
    batches: tuple[int, int],
    generation: int,
    training: tuple[int, int, int, int],
    measured: int,
    seconds: float,
    **other: Any,
) -> Row:
    """A row of NeMo-RL's table, whose micro-batches are packed.

    Its tokens per second are those of responses of the stated average and prompts of ``PROMPT``.
    """
    prompt = PROMPT
    lengths = (prompt, mean, longest - prompt, *batches, 32 if longest > 2000 else 16)
    packed = (longest, measured * longest)
    return Row(
        *(NEMO, model, "h100-80gb", gpus, *lengths, generation, training, *packed),
        seconds,
        **other,
    )


ROWS = [
    _nemo("Llama-3.1-8B", 16, 1019, 4096, (2048, 512), 1, (1, 1, 1, 2), 2, 92.8,
          recomputes=True),
    _nemo("Llama-3.1-8B", 16, 1019, 4096, (2048, 512), 1, (1, 1, 1, 2), 2, 64.8,
          ahead=True, recomputes=True),
    _nemo("Qwen3-32B", 32, 3256, 4096, (2048, 2048), 4, (4, 1, 1, 4), 4, 323,
          passes=ONE_PASS),
    _nemo("Qwen3-32B", 64, 3256, 4096, (2048, 2048), 4, (4, 1, 1, 4), 4, 161,
          ahead=True, passes=ONE_PASS),
    _nemo("Qwen3-30B-A3B", 32, 3198, 4096, (2048, 2048), 2, (1, 1, 8, 1), 4, 171,
          passes=ONE_PASS),
    _nemo("Qwen3-30B-A3B", 32, 3198, 4096, (2048, 2048), 2, (1, 1, 8, 2), 4, 141,
          ahead=True, passes=ONE_PASS),
    _nemo("Qwen3-235B-A22B", 128, 5719, 8192, (512, 512), 16, (2, 2, 16, 8), 1, 367,
          recomputes=True),
    _nemo("DeepSeek-V3", 256, 722, 1536, (512, 512), 32, (1, 1, 16, 16), 1, 93,
          recomputes=True),
]  # fmt: skip


def main() -> None:
    parser = record.parser(__doc__ or "")
    arguments = parser.parse_args()
    found = [(row, predict(row)) for row in ROWS]
    rows = [_described(row, prediction) for row, prediction in found]
    errors = {
        name: [abs(one["predicted_over_published"] - 1) for one in rows if one["rows"] == name]
        for name in ("fitted", "judged")
    }
    summary = {
        name: {"median_error": round(median(values), 3), "largest_error": round(max(values), 3)}
        for name, values in errors.items()
    }
    summary["other_halves"] = {
        "as_named": _chosen(found, [row.fitted for row, _ in found]),
        "rows_1_4_5_8_fitted": _chosen(found, [i in (0, 3, 4, 7) for i in range(len(found))]),
    }
    source = found[0][1].source
    constants = {"ENGINE": ENGINE, "TRAINER": TRAINER}
    record.record(
        {"summary": summary, "constants": constants, "kernels": source, "steps": rows},
        arguments.out,
    )


def _chosen(found: list[tuple[Row, Prediction]], fitted: list[bool]) -> dict[str, float]:
    """Constants with the least mean error on some rows, and the errors of the other rows.

    Generation is proportional to one constant, the passes to the other: the host's part, which is
    not, is small in these rows.
    """
    parts = []
    for row, prediction in found:
        seconds = {phase.name: phase.seconds for phase in prediction.phases}
        generation, sync = seconds.pop("generation"), seconds.pop("weight sync")
        parts.append((row, generation / ENGINE, sum(seconds.values()) / TRAINER, sync))

    def ratios(engine: float, trainer: float) -> list[float]:
        found = []
        for row, generation, passes, sync in parts:
            sides = engine * generation, trainer * passes + sync
            found.append((max(sides) if row.ahead else sum(sides)) / row.seconds)
        return found

    def mean_of_fitted(constants: tuple[float, float]) -> float:
        pairs = zip(ratios(*constants), fitted, strict=True)
        return mean(abs(math.log(ratio)) for ratio, one in pairs if one)

    grid = [(1 + i / 50, 1 + j / 50) for i in range(80) for j in range(80)]
    engine, trainer = min(grid, key=mean_of_fitted)
    pairs = zip(ratios(engine, trainer), fitted, strict=True)
    judged = [abs(ratio - 1) for ratio, one in pairs if not one]
    return {
        "engine": round(engine, 2),
        "trainer": round(trainer, 2),
        "judged_median_error": round(median(judged), 3),
        "judged_largest_error": round(max(judged), 3),
    }


def _described(row: Row, prediction: Prediction) -> dict[str, Any]:
    return {
        "rows": "fitted" if row.fitted else "judged",
        "model": row.model,
        "gpus": f"{row.gpus} x {row.gpu}",
        "mode": "one step ahead" if row.ahead else "on-policy",
        "predicted_s": round(prediction.seconds, 1),
        "published_s": row.seconds,
        "predicted_over_published": round(prediction.seconds / row.seconds, 3),
        "predicted_phases_s": {phase.name: round(phase.seconds, 1) for phase in prediction.phases},
        "source": row.source,
    }


def predict(row: Row) -> Prediction:
    """Predict a published step."""
    config = AutoConfig.for_model(**MODELS[row.model])
    gpus = row.gpus // 2 if row.ahead else row.gpus
    actor = _role("actor", row, config, gpus)
    roles = [actor, _role("ref", row, config, gpus)]
    shape = actor.shape
    weights = 2 * model_parameters(parameter_table(shape), False) / row.generation
    gpu = find_gpu(row.gpu)
    cache = 0.9 * gpu.nbytes - weights if row.ahead else 0.7 * gpu.nbytes - weights
    per_token = 4 * shape.num_layers * max(1, shape.kv_heads // row.generation) * shape.head_dim
    if shape.mla is not None:
        per_token = 2 * shape.num_layers * (shape.mla.kv_lora_rank + shape.mla.qk_rope_head_dim)
    load = StepLoad(
        StepSequences(row.batch, row.prompt, row.mean, row.longest, row.samples),
        roles,
        Servers(gpus // row.generation, row.generation, 1024, cache / per_token),
        "sequential",
        row.passes,
        row.gpus,
        overlapped=row.ahead,
    )
    return predict_step(load, open_library(gpu))


def _role(name: str, row: Row, config: Any, gpus: int) -> RoleLoad:
    shape = model_shape(config)
    tp, cp, ep, pp = row.training
    layout = Layout(gpus, tp=tp, cp=cp, ep=ep, pp=pp)
    table = parameter_table(shape)
    ends = {}
    if shape.num_layers % pp:  # the first and the last stage have fewer
        rest = pp * -(-shape.num_layers // pp) - shape.num_layers
        each = -(-shape.num_layers // pp)
        ends = {"first": each - rest // 2 - rest % 2, "last": each - rest // 2}
    layers = stage_layers(shape.num_layers, pp, **ends)
    counts = [count_parameters(table, layout, i, own, False).total for i, own in enumerate(layers)]
    head: Head = "policy"
    return RoleLoad(
        *(name, shape, experts_per_token(config), model_flops(config, head), layout, layers),
        *(counts, True, row.batch // row.mini_batch if name == "actor" else 0, 1),
        *(MicroBatchLimits(1, row.packed), MicroBatchLimits(1, row.measured)),
        *(model_parameters(table), row.recomputes),
        lean_head=False,
    )


if __name__ == "__main__":
    main()

"""Floating-point operations of a model, computed from its parameter table.

A multiply-add of a matrix product is two operations. Lookups, norms, activations, softmax,
recomputation and padding are not counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from mppo.batch.batch import Sequences
from mppo.batch.microbatches import MicroBatchPlan
from mppo.models.families.architectures import family_config
from mppo.planning.memory import experts_per_token
from mppo.recipe.model_shape import ModelShape, model_shape
from mppo.recipe.sections.role_config import Head
from mppo.weights.table import parameter_table
from mppo.weights.table_rows import Row


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of a model's forward pass.

    Args:
        per_token: operations per token of all matrices not in ``per_output``; in a mixture of
            experts, of the experts that process the token.
        per_output: operations per token that passes the head: the head, and the last layer's
            feed-forward unless it is a mixture.
        windows: by layer, the number of tokens that a query sees, itself included; None: all
            before it.
    """

    per_token: int
    per_output: int
    per_pair: int
    windows: tuple[int | None, ...]

    def forward(self, lengths: Iterable[int], outputs: int) -> int:
        """Operations of a forward pass over sequences of ``lengths`` tokens; ``outputs`` pass the
        head."""
        lengths = list(lengths)
        pairs = sum(seen_pairs(n, window) for window in self.windows for n in lengths)
        return self.per_token * sum(lengths) + self.per_output * outputs + self.per_pair * pairs

    def training(self, lengths: Iterable[int], outputs: int) -> int:
        """Operations of forward and backward; backward has two products for each of forward."""
        return 3 * self.forward(lengths, outputs)


def seen_pairs(length: int, window: int | None) -> int:
    """Pairs of a query and a visible key in a causal sequence: ``sum_i min(i, window)``."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


def model_flops(hf_config: Any, head: Head) -> ModelFlops:
    """Operations of the model a Hugging Face config describes."""
    shape, family = model_shape(hf_config), family_config(hf_config)
    table, active_experts = parameter_table(shape), experts_per_token(hf_config)
    last = shape.num_layers - 1
    per_token = per_output = 0
    for row in table.rows:
        # an expert row is the size of one expert; a token passes through the active ones
        products = _multiply_adds(row) * (active_experts if row.where == "expert" else 1)
        layers = sum(table.applies(row, layer) for layer in range(shape.num_layers))
        # the last layer's feed-forward runs only for tokens that pass the head
        if row.where == "dense" and table.applies(row, last):
            layers, per_output = layers - 1, per_output + products
        per_token += layers * products
        if row.where == ("value" if head == "value" else "output"):
            per_output += products
    per_pair = 2 * _pair_products(shape)
    return ModelFlops(2 * per_token, 2 * per_output, per_pair, family.layer_windows)


def update_flops(model: ModelFlops, batch: Sequences, plan: MicroBatchPlan, head_B: Tensor) -> int:
    """Operations of forward and backward over a plan's micro-batches, summed over all ranks.

    ``head_B``, int64 ``[B]``: tokens of each sequence that pass the head.
    """
    chosen = [index for rank in plan for indices in rank for index in indices]
    lengths = cast("list[int]", batch.lengths_B[chosen].tolist())  # pyright: ignore[reportUnknownMemberType] (torch's stub)
    return model.training(lengths, int(head_B[chosen].sum()))


def _multiply_adds(row: Row) -> int:
    """Multiply-adds per token of a row's matrices; vectors (norms, biases) have none."""
    return sum(math.prod(shape) for shape in row.shapes if len(shape) == 2)


def _pair_products(shape: ModelShape) -> int:
    """Multiply-adds of one layer's attention scores and weighted values, per pair."""
    if shape.mla is None:
        return shape.heads * 2 * shape.head_dim
    mla = shape.mla
    return shape.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)


PEAKS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("GB200",), 2500.0),
    (("B200",), 2250.0),
    (("H200", "NVL"), 835.0),
    (("H200",), 989.4),
    (("GH200",), 989.4),
    (("H100", "PCIe"), 756.0),
    (("H100", "NVL"), 835.0),
    (("H100",), 989.4),
    (("H800", "PCIe"), 756.0),
    (("H800",), 989.4),
    (("H20",), 148.0),
    (("A100",), 312.0),
    (("A800",), 312.0),
    (("A40",), 149.7),
    (("A30",), 165.0),
    (("A10",), 125.0),
    (("L40S",), 362.0),
    (("L40",), 181.0),
    (("L20",), 119.5),
    (("L4",), 121.0),
)
"""Words of a GPU's name, and its peak without sparsity as published by NVIDIA (not measured). The
first row whose words all occur in the name applies."""


def peak_tflops(name: str) -> float | None:
    """Peak of a device by its name, TFLOP/s; None for a CPU, a part of a GPU (MIG), or a GPU not in
    ``PEAKS``."""
    words = set(re.split(r"[\s-]+", name))
    if "MIG" in words:
        return None
    return next((peak for name_words, peak in PEAKS if words.issuperset(name_words)), None)

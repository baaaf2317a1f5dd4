"""Floating-point operations that a model's mathematics needs, from its parameter table.

Two operations for each multiply-add of a matrix product; lookups, norms, activations and the
softmax do not count, nor does what a layout does twice (recomputation, padding).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mppo.algos.masked import sequence_sum
from mppo.batch import Batch
from mppo.models.families.architectures import family_config
from mppo.models.heads.outputs import Head
from mppo.pipeline.microbatches import MicroBatchPlan
from mppo.planning.memory import experts_per_token
from mppo.weights.shape import ModelShape, model_shape
from mppo.weights.table import Row, parameter_table


@dataclass(frozen=True)
class ModelFlops:
    """Operations of a forward pass.

    Args:
        per_token: of the layers' other matrices; of a mixture, those of the experts a token visits.
        per_output: of the head and of the last layer's feed-forward (not of a mixture), for each
            token whose log-probability or value is wanted.
        per_pair: of one layer's attention, for each query and key it sees.
        windows: tokens a query sees, itself included, by layer; None where it sees all before it.
    """

    per_token: int
    per_output: int
    per_pair: int
    windows: tuple[int | None, ...]

    def forward(self, lengths: Iterable[int], outputs: int) -> int:
        """Operations of a forward pass.

        Args:
            lengths: tokens of each sequence.
            outputs: tokens that pass the head.
        """
        lengths = list(lengths)
        pairs = sum(seen_pairs(n, window) for window in self.windows for n in lengths)
        return self.per_token * sum(lengths) + self.per_output * outputs + self.per_pair * pairs

    def training(self, lengths: Iterable[int], outputs: int) -> int:
        """Of forward and backward, which needs two products for each one of forward."""
        return 3 * self.forward(lengths, outputs)


def seen_pairs(length: int, window: int | None) -> int:
    """Pairs of a query and a key it sees in a causal sequence: ``sum_i min(i, window)``."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


def model_flops(hf_config: Any, head: Head) -> ModelFlops:
    """Operations of the model a Hugging Face config describes.

    Args:
        hf_config: a transformers config object.
        head: what the model ends in.
    """
    shape, family = model_shape(hf_config), family_config(hf_config)
    table, visited = parameter_table(shape), experts_per_token(hf_config)
    last = shape.num_layers - 1
    per_token = per_output = 0
    for row in table.rows:
        products = _multiply_adds(row) * (visited if row.where == "expert" else 1)
        layers = sum(table.applies(row, layer) for layer in range(shape.num_layers))
        if row.where == "dense" and table.applies(row, last):
            layers, per_output = layers - 1, per_output + products
        per_token += layers * products
        if row.where == ("value" if head == "value" else "output"):
            per_output += products
    per_pair = 2 * _pair_products(shape)
    return ModelFlops(2 * per_token, 2 * per_output, per_pair, family.layer_windows)


def update_flops(model: ModelFlops, batch: Batch, plan: MicroBatchPlan, mask_T: Tensor) -> int:
    """Operations of forward and backward over a plan's micro-batches, of all ranks together.

    Args:
        model: the model's.
        batch: the global batch.
        plan: sequences of every data-parallel rank's micro-batches.
        mask_T: float ``[T]`` of the batch, 1 on the tokens that pass the head.
    """
    chosen = [index for rank in plan for indices in rank for index in indices]
    outputs = sequence_sum(mask_T, batch.cu_seqlens)[chosen].sum()
    return model.training(batch.lengths_B[chosen].tolist(), int(outputs))


def _multiply_adds(row: Row) -> int:
    """For each token that meets the row's matrices; vectors (norms, biases) have none."""
    return sum(math.prod(shape) for shape in row.shapes if len(shape) == 2)


def _pair_products(shape: ModelShape) -> int:
    """Multiply-adds of one layer's scores and their weighted values, for one pair."""
    if shape.mla is None:
        return shape.heads * 2 * shape.head_dim
    latent = shape.mla
    return shape.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim + latent.v_head_dim)

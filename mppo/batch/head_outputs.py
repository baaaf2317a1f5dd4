"""Outputs of a role's head for each token of a micro-batch or a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from torch import Tensor

from mppo.recipe.sections.role_config import Head


@dataclass(frozen=True)
class PolicyOutputs:
    """A policy's outputs, float32 ``[T]`` each; 0 on tokens that are not predicted.

    Args:
        entropy_T: of the distribution token t was drawn from (nats).
        full_kl_T: KL against the reference over the vocabulary (nats); None if the pass had no
            hidden states of the reference and computes no ``squares_T``, otherwise 0 without them.
        squares_T: sum of the squared probabilities of the vocabulary; None if not computed.
    """

    logprobs_T: Tensor
    entropy_T: Tensor
    full_kl_T: Tensor | None = None
    squares_T: Tensor | None = None


@dataclass(frozen=True)
class ValueOutputs:
    """A value model's outputs; 0 on tokens that are not predicted.

    Args:
        values_T: value of the state before token t, float32 ``[T]``.
        logits_KT: in training, logits of the bins of a histogram of values, float32 ``[K, T]``;
            None: in a pass without gradients, or the value head gives one number.
    """

    values_T: Tensor
    logits_KT: Tensor | None = None


HeadOutputs = PolicyOutputs | ValueOutputs


def tensors_of(outputs: HeadOutputs) -> list[Tensor]:
    """The outputs' tensors in the order of the fields, without those that are None."""
    values = [getattr(outputs, field.name) for field in fields(outputs)]
    return [value for value in values if value is not None]


def map_outputs(outputs: HeadOutputs, function: Callable[[Tensor], Tensor]) -> HeadOutputs:
    return type(outputs)(*map(function, tensors_of(outputs)))


def add_outputs(outputs: HeadOutputs, others: HeadOutputs) -> HeadOutputs:
    """Add outputs of the same tokens, which are 0 where a pass left them out."""
    pairs = zip(tensors_of(outputs), tensors_of(others), strict=True)
    return type(outputs)(*(x + y for x, y in pairs))


def unstack_outputs(head: Head, rows_kT: Tensor) -> HeadOutputs:
    """Outputs of a model that ends in ``head``, from its :func:`tensors_of` stacked ``[k, T]``."""
    return PolicyOutputs(*rows_kT) if head == "policy" else ValueOutputs(*rows_kT)


def num_outputs(head: Head, with_full_kl: bool, with_squares: bool) -> int:
    if head == "value":
        return 1
    return 4 if with_squares else 2 + with_full_kl

"""Selecting sequences of a batch or an experience, and joining batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mppo.algos.token_axis import cumulative, select_cu_seqlens, select_sequences
from mppo.batch.batch import Batch, Sequences
from mppo.batch.gathers import sequence_digests
from mppo.batch.outputs import Experience, Outputs
from mppo.safety.input_error import InputError

Indices = Sequence[int] | Tensor
Holder = TypeVar("Holder", Batch, Outputs, Experience)
Part = TypeVar("Part", bound=Sequences)


def _select_fields(holder: Holder, batch: Batch, indices: Tensor) -> dict[str, Tensor]:
    """Select the sequences' part of every ``_T`` and ``_B`` tensor of a dataclass."""
    places = batch.places(indices)
    held, changes = places[places >= 0], {}
    for field in fields(holder):
        value = getattr(holder, field.name)
        if field.name.endswith("_T"):
            changes[field.name] = select_sequences(value, batch.cu_seqlens, held)
        elif field.name.endswith("_B") and value is not None:
            changes[field.name] = value[indices]
    return changes


def select_batch(batch: Batch, indices: Indices) -> Batch:
    """Select sequences in the order of ``indices``; repeats are allowed. Their homes stay."""
    chosen = torch.as_tensor(indices, dtype=torch.int64)
    places = batch.places(chosen)
    return replace(
        batch,
        cu_seqlens=select_cu_seqlens(batch.cu_seqlens, places[places >= 0]),
        held_H=(places >= 0).nonzero()[:, 0],
        **_select_fields(batch, batch, chosen),
    )


def select_outputs(outputs: Outputs, indices: Indices) -> Outputs:
    chosen = torch.as_tensor(indices, dtype=torch.int64)
    changes = _select_fields(outputs, outputs.batch, chosen)
    return replace(outputs, batch=select_batch(outputs.batch, chosen), **changes)


def select_experience(experience: Experience, indices: Indices) -> Experience:
    """See :func:`select_batch`; for an experience."""
    chosen, outputs = torch.as_tensor(indices, dtype=torch.int64), experience.old
    changes = _select_fields(experience, outputs.batch, chosen)
    return replace(experience, old=select_outputs(outputs, chosen), **changes)


def concatenate_batches(batches: Sequence[Part]) -> Part:
    """Concatenate batches, at least one, of the first one's type or a derived one."""
    if not batches:
        raise InputError("concatenate_batches needs at least one batch")
    counts = torch.tensor([batch.num_sequences for batch in batches])
    before = (counts.cumsum(0) - counts).tolist()
    held_H = torch.cat([batch.held_H + shift for batch, shift in zip(batches, before)])
    lengths_B = torch.cat([batch.lengths_B for batch in batches])
    cu_seqlens = cumulative(lengths_B[held_H])
    changes: dict[str, Any] = {
        field.name: torch.cat([getattr(batch, field.name) for batch in batches])
        for field in fields(batches[0])
        if field.name.endswith(("_T", "_B")) and field.name != "digest_B"
    }
    if isinstance(batches[0], Batch):
        changes["episode_B"] = _joined_episodes([batch.episode_B for batch in batches])  # pyright: ignore[reportAttributeAccessIssue]
    if batches[0].digest_B is not None:
        changes["digest_B"] = torch.cat([sequence_digests(batch) for batch in batches])
    return replace(batches[0], cu_seqlens=cu_seqlens, held_H=held_H, **changes)


def _joined_episodes(parts: Sequence[Tensor]) -> Tensor:
    """``Batch.episode_B`` of several batches, whose episodes are different ones."""
    found = []
    first = 0
    for episode_B in parts:
        _, of_B = torch.unique(episode_B, return_inverse=True)
        found.append(of_B + first)
        first += int(of_B.max()) + 1 if len(of_B) else 0
    return torch.cat(found)

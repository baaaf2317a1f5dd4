"""Explained variance by the age of tokens: does the critic know states of earlier policies too."""

from __future__ import annotations

from torch import Tensor

from mppo.algos.masked import Moments, merged_moments, sequence_moments
from mppo.batch.batch import Batch
from mppo.batch.gathers import gather_of, gather_table

BY_AGE = "critic/vf_explained_var_by_age/"
"""Prefix of the metrics; an age in updates follows."""


def moments_by_age(
    errors_T: Tensor, returns_T: Tensor, mask_T: Tensor, batch: Batch, step: int, bound: int
) -> dict[int, tuple[Moments, Moments]]:
    """Moments of errors (returns less values) and returns of the tokens of each age, ascending; {}
    if all tokens are of one age. Collective. Weights of version ``step - 1`` are of age 0;
    ``bound`` is the oldest age (``rollout.max_staleness``)."""
    if not bound:
        return {}
    table = {}
    for age in range(bound + 1):
        of_age_T = mask_T * (batch.weight_version_T == step - 1 - age)
        for name, x_T in (("errors", errors_T), ("returns", returns_T)):
            table[f"{name} {age}"] = sequence_moments(x_T, of_age_T, batch.cu_seqlens)
    rows = {name: merged_moments(x) for name, x in gather_table(gather_of(batch), table).items()}
    found = {age: (rows[f"errors {age}"], rows[f"returns {age}"]) for age in range(bound + 1)}
    present = {age: each for age, each in found.items() if each[1].count}
    return present if len(present) > 1 else {}

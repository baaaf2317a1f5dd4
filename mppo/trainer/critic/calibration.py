"""How well the critic knows the returns: in ten groups of tokens, and by the tokens' age."""

from __future__ import annotations

import torch
from torch import Tensor

from mppo.algos.masked import Moments, merged_moments, sequence_moments
from mppo.batch.batch import Batch
from mppo.batch.gathers import gather_of, gather_table
from mppo.parallel.collectives import group_size
from mppo.parallel.exchange import sum_over_ranks

GROUPS = 10
CELLS = 1000
"""Equal cells of the range of values, in which tokens are counted before they are grouped."""
VALUE, RETURN, ERROR = (
    "critic/calibration/value/", "critic/calibration/return/", "critic/calibration/error",
)  # fmt: skip
"""Metrics: mean value and mean return of each group (``value/0`` is of the lowest values), and the
mean over tokens of the distance between the two."""


def calibration_metrics(
    values_T: Tensor, returns_T: Tensor, mask_T: Tensor, batch: Batch, of_values: Moments
) -> dict[str, float]:
    """Mean value and mean return of each tenth of the tokens, in order of their values. Collective.
    Equal values are in one group, so that groups may be empty: those have no metrics. Tokens are
    counted in cells of a thousandth of the range; ``of_values`` are moments over all ranks."""
    if not of_values.count:
        return {}
    inside_T = mask_T > 0
    values_N, returns_N = values_T[inside_T].double(), returns_T[inside_T].double()
    width = max(of_values.max - of_values.min, torch.finfo(torch.float32).tiny) / CELLS
    cell_N = ((values_N - of_values.min) / width).long().clamp(0, CELLS - 1)
    sums = torch.zeros(3, CELLS, dtype=torch.float64)
    for row, x_N in zip(sums, (torch.ones_like(values_N), values_N, returns_N)):
        row.index_add_(0, cell_N, x_N)
    if not batch.is_replicated and group_size() > 1:
        sum_over_ranks(sums)
    count = sums[0]
    middle = (count.cumsum(0) - count / 2) / count.sum()
    group = (GROUPS * middle).long().clamp(max=GROUPS - 1)
    grouped = torch.zeros(3, GROUPS, dtype=torch.float64).index_add_(1, group, sums)
    metrics: dict[str, float] = {}
    error = 0.0
    for number, (tokens, value, target) in enumerate(grouped.T.tolist()):
        if tokens:
            metrics[f"{VALUE}{number}"] = value / tokens
            metrics[f"{RETURN}{number}"] = target / tokens
            error += abs(target - value)
    return metrics | {ERROR: error / count.sum().item()}


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

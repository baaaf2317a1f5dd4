"""Calibration of the critic: predicted values against returns, in ten groups of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from mppo.algos.masked import Moments
from mppo.batch.batch import Batch
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

"""A moving average of a role's weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mppo.models.stage import Stage


class MovingAverage:
    """Float32 averages of this rank's shards, in host memory, initialised with the weights. Every
    rank averages its own shards, without communication: the average of a shard is the shard of the
    average, in every layout. Source: DeepSpeed-Chat ``moving_average`` and OpenRLHF
    ``--enable_ema``, both with a decay of 0.992."""

    def __init__(self, stages: Sequence[Stage], decay: float) -> None:
        self.decay = decay
        self._weights = [p for stage in stages for p in stage.parameters()]
        self._averages = [p.detach().float().cpu().clone() for p in self._weights]

    @torch.no_grad()
    def update(self) -> None:
        """``average = decay * average + (1 - decay) * weight``, once per optimizer step."""
        for average, weight in zip(self._averages, self._weights):
            average.lerp_(weight.to(average.device, average.dtype), 1.0 - self.decay)

    def of_parameters(self) -> dict[int, Tensor]:
        return {id(p): average for p, average in zip(self._weights, self._averages)}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the context the model holds the averages, rounded to its dtype."""
        kept = [p.data for p in self._weights]
        try:
            with torch.no_grad():
                for p, average in zip(self._weights, self._averages):
                    p.data = average.to(p.device, p.dtype)
            yield
        finally:
            for p, data in zip(self._weights, kept):
                p.data = data

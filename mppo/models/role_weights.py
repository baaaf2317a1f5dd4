"""A role's weights: loading, streaming to an engine, slices for an engine, saving, averaging."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mppo.models.heads.value_head import initial_std
from mppo.models.stage import Stage
from mppo.parallel import device
from mppo.parallel.groups import LayoutGroups
from mppo.parallel.moved_storages import MovedStorages
from mppo.recipe.model_shape import model_shape
from mppo.recipe.sections.role_config import RoleConfig
from mppo.weights.bucket import WeightBucket
from mppo.weights.model_folder import companion_folder
from mppo.weights.save import save_hf
from mppo.weights.slices.slice_source import SliceSource
from mppo.weights.stream import WeightStream
from mppo.weights.table import parameter_table
from mppo.weights.torch_dist.checkpoint import load_weights


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


class RoleWeights:
    """The parameters of a role's stages on this rank. The constructor loads the weights from a
    Hugging Face folder or a Megatron checkpoint and draws a value head that they lack (``fresh``);
    it is collective and needs the layout's groups active. ``slices`` are the current weights, cut
    for the ranks of an engine."""

    def __init__(
        self,
        stages: Sequence[Stage],
        hf_config: Any,
        groups: LayoutGroups,
        role: RoleConfig,
        folder: Path,
    ) -> None:
        self._stages, self._hf_config, self._groups = stages, hf_config, groups
        self._folder = folder
        self.storages = MovedStorages(self._parameters, device.device())
        self.fresh = load_weights(folder, stages, hf_config, groups)
        if self.fresh and stages[-1].post_process:
            std = initial_std(role.value_head_init, hf_config)
            stages[-1].value_head.draw(std, role.seed)
        self.slices = SliceSource(stages, hf_config, groups.layout)
        self.average = None if role.ema_decay is None else MovingAverage(stages, role.ema_decay)
        self._streams: dict[int, WeightStream] = {}

    def _parameters(self) -> Iterator[Tensor]:
        return (p for stage in self._stages for p in stage.parameters())

    @property
    def projection_name(self) -> str:
        """Name of the vocabulary projection in the stream: the embeddings' where it is tied."""
        return parameter_table(model_shape(self._hf_config)).projection_entry().hf[0]

    def stream(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        """Gather the current weights as complete Hugging Face tensors, in buckets. Collective."""
        with self._groups.active():
            if bucket_bytes not in self._streams:
                self._streams[bucket_bytes] = WeightStream(
                    self._stages, self._hf_config, self._groups, bucket_bytes
                )
            yield from self._streams[bucket_bytes]

    def save(self, folder: Path) -> Path | None:
        """Write the current weights as a Hugging Face folder, with the initial config and
        tokenizer; returns as ``save_hf``. Collective."""
        with self._groups.active():
            source = companion_folder(self._folder)
            return save_hf(folder, self._stages, self._hf_config, self._groups, source=source)

    def save_average(self, folder: Path) -> Path | None:
        assert self.average is not None, "the role keeps no moving average"
        with self.average.in_place():
            return self.save(folder)

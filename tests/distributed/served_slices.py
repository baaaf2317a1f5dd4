"""A model's slices on rollout ranks: planned, sent and loaded, with the expected values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mppo.recipe.model_shape import ModelShape, model_shape
from mppo.rollout.transport.checked_load import BYTES, TABLE, tensor_checksum
from mppo.rollout.transport.slice_load import load, slice_table
from mppo.rollout.transport.slice_sync import message_row
from mppo.weights.blocks import ZERO
from mppo.weights.slices.reshard import engine_blocks, engine_tensor
from mppo.weights.slices.slice_plan import SliceRequest
from mppo.weights.slices.slice_source import SliceStream
from mppo.weights.stream import WeightStream
from mppo.weights.table import parameter_table

SIZE = 2
HOSTS = ((0, 1), (3, 3))
"""Two engines of two ranks; one training rank hosts both ranks of the second."""


class Server(nn.Module):
    """Parameters as a rollout rank lays them out, full of NaNs."""

    def __init__(self, config, rank: int, experts: int) -> None:
        super().__init__()
        self.held: dict[str, Tensor] = {}
        shape = model_shape(config)
        for entry, _ in held_entries(shape, rank, experts):
            place = engine_tensor(entry, shape, rank, SIZE, expert_parallel=experts)
            self.held.setdefault(place.name, torch.full(place.shape, torch.nan))

    def named_parameters(self, *args: object, **kwargs: object):
        return iter(self.held.items())


def held_entries(shape: ModelShape, rank: int, experts: int):
    """The entries of a rollout rank and their blocks."""
    for entry in parameter_table(shape).entries():
        blocks = engine_blocks(entry, shape, rank, SIZE, expert_parallel=experts)
        if blocks:
            yield entry, blocks


def expected(config, tensors: dict[str, Tensor], rank: int, experts: int) -> dict[str, Tensor]:
    """These parameters, sliced from complete tensors; NaN in padding."""
    shape = model_shape(config)
    held = Server(config, rank, experts).held
    for entry, blocks in held_entries(shape, rank, experts):
        place = engine_tensor(entry, shape, rank, SIZE, expert_parallel=experts)
        dim = entry.cut_dim
        into = held[place.name] if place.expert is None else held[place.name][place.expert]
        at = place.first
        for block in blocks:
            if block.source != ZERO:
                part = tensors[entry.hf[block.source]].narrow(dim, block.start, block.length)
                into.narrow(dim, at, block.length).copy_(part)
            at += block.length
    return held


def check_slices(stages, config, layout, groups, folder: Path) -> None:
    """Updates, some of what changed; each rollout rank holds what it should, its engine's experts
    cut or shared out."""
    for experts in (1, SIZE) if model_shape(config).num_experts else (1,):
        _check_slices(stages, config, layout, groups, folder, experts)


def _check_slices(stages, config, layout, groups, folder: Path, experts: int) -> None:
    rank = dist.get_rank()
    servers = {
        SIZE * engine + place: Server(config, place, experts)
        for engine, hosts in enumerate(HOSTS)
        for place, host in enumerate(hosts)
        if host == rank
    }
    request = SliceRequest(HOSTS, torch.float32, 20_000, True, tensor_checksum, experts)
    stream = SliceStream(stages, config, layout, request)
    for version, since in ((1, None), (2, 1), (3, 1)):
        _load_all(stream.update(version, since), servers, folder / f"refused_{rank}")
        complete = dict(
            pair for bucket in WeightStream(stages, config, groups, 40_000) for pair in bucket
        )
        for slot, server in servers.items():
            for name, tensor in expected(config, complete, slot % SIZE, experts).items():
                assert torch.equal(server.held[name].nan_to_num(7e9), tensor.nan_to_num(7e9)), name
        moved = stream.bytes
        if version == 2:
            assert 0 < moved.sent < 0.5 * moved.total
        else:  # no rank has version 1 any more
            assert moved.total <= moved.sent <= 1.1 * moved.total
            assert moved.least <= moved.crossing <= 1.1 * moved.least + 64
        _change_some(stages)


def _load_all(buckets, servers: dict[int, Server], report: Path) -> None:
    for bucket in buckets:
        for slot, messages in bucket.messages.items():
            rows, at = [], 0
            for message in messages:
                rows.append(message_row(at, message, bucket.checks))
                at += len(message.content)
            flat = torch.cat([torch.empty(0, dtype=torch.uint8), *(m.content for m in messages)])
            load(servers[slot], [(BYTES, flat), (TABLE, slice_table(rows, report))])
            assert not report.exists(), report.read_text()


@torch.no_grad()
def _change_some(stages: Sequence[nn.Module]) -> None:
    """A few elements of every parameter, as a step rounded to a short type does."""
    for stage in stages:
        for parameter in stage.parameters():
            flat = parameter.data.view(-1)
            flat[:: max(97, len(flat) // 8)] += 0.125

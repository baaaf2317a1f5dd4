"""Memory of a weight sync: the buckets of a weight stream on their way to a server's buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from mppo.parallel.layout import Layout
from mppo.weights.blocks import padded_vocab_size
from mppo.weights.bucket import aligned
from mppo.weights.stream import Unit, cut_buckets, exported_bytes, plan_units
from mppo.weights.table import Entry, Table

BUFFERS = 2
"""Buffers that servers read by turns (``mppo.rollout.transport``)."""


@lru_cache(maxsize=256)
def stream_bytes(
    table: Table,
    layout: Layout,
    stage: int,
    layers: tuple[tuple[int, ...], ...],
    bucket_bytes: int,
    itemsize: int,
) -> int:
    """Most bytes that a weight sync allocates on one rank besides the weights.

    A bucket of the stage is gathered from the shards of its tensor-parallel or expert-parallel
    ranks: this rank's shards, those of all ranks and the assembled bucket are then in memory,
    besides the bucket before it and the two buffers that servers read, which grow to the largest
    buckets that they held. Ranks of other stages hold the assembled bucket only. A tensor larger
    than ``bucket_bytes`` has a bucket of its own.
    """

    def bytes_of(entry: Entry) -> int:
        return 4 if entry.row.keep_fp32 else itemsize

    owner: dict[Any, int] = {layer: at for at, owned in enumerate(layers) for layer in owned}
    for row in table.rows:
        if row.where in ("embedding", "final", "output"):
            owner[row.name] = 0 if row.where == "embedding" else layout.pp - 1
    peak, previous, buffers = 0, 0, [0] * BUFFERS
    buckets = cut_buckets(plan_units(table, layout, owner), bucket_bytes, bytes_of)
    for number, units in enumerate(buckets):
        content = sum(exported_bytes(e, bytes_of) for unit in units for e in unit.entries)
        gathered = 0
        if units[0].stage == stage:
            gathered = _gathered_bytes(units, layout, bytes_of)
        peak = max(peak, sum(buffers) + previous + content + gathered)
        turn = number % BUFFERS
        buffers[turn] = max(buffers[turn], content)
        peak = max(peak, sum(buffers) + content)
        previous = content
    return peak


def _gathered_bytes(units: Sequence[Unit], layout: Layout, bytes_of: Callable[[Entry], int]) -> int:
    """Bytes of a bucket's shards: this rank's, and those of all ranks of their groups."""

    def shard(entry: Entry) -> int:
        size = layout.etp if entry.row.group == "etp" else layout.tp
        padded = padded_vocab_size(entry.row.shapes[0][0], layout.tp)
        shape = entry.shard_shape(size, padded if entry.row.kind == "vocab" else 0)
        return aligned(math.prod(shape) * bytes_of(entry))

    plain = [e for unit in units if unit.expert is None for e in unit.entries]
    cut = sum(shard(e) for e in plain if e.row.dim is not None) if layout.tp > 1 else 0
    # a unit holds the experts of all expert-parallel ranks: this rank packs its own
    experts = sum(shard(e) for unit in units if unit.expert is not None for e in unit.entries)
    own = experts // layout.ep
    by_etp = own * layout.etp if layout.etp > 1 else 0
    by_ep = own * layout.etp * layout.ep if layout.ep > 1 else 0
    return cut * (1 + layout.tp) + (own + by_etp + by_ep)

"""From a training layout to a rollout engine's layout: which parts of which shards move where.

Both layouts are lists of blocks of the same Hugging Face tensors, so the plan is the intersection
of their intervals. A destination rank takes from its own shard every element that the shard holds;
so the fewest possible elements cross ranks.

SGLang fuses tensors that are separate in a checkpoint: queries, keys and values; gate and up; all
experts of a layer; MLA's two down projections. ``engine_blocks`` gives the order inside a fused
parameter, ``engine_tensor`` the place of an entry in it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mppo.parallel.layout import Layout
from mppo.recipe.model_shape import ModelShape
from mppo.weights.blocks import ZERO, Block, padded_vocab_size, shard_blocks
from mppo.weights.table import Entry
from mppo.weights.table_rows import Row

_REPLICATED = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
SourcePiece = tuple[int, int, int, int]
"""A part of a source tensor that a shard holds: start, length, shard, offset in the shard."""


@dataclass(frozen=True)
class Move:
    """``length`` rows (columns if the entry is cut along dimension 1) of one parameter. Offsets are
    within the shards of source and destination, along the entry's ``cut_dim``. ``source`` and
    ``destination`` are training ranks; ``slot`` is the rollout rank, counted over the engines, that
    ``destination`` hosts."""

    source: int
    source_offset: int
    destination: int
    destination_offset: int
    length: int
    slot: int


@dataclass(frozen=True)
class Reshard:
    """The moves of one entry: elements that cross ranks, all in the engines' shards, and those that
    would move if every training rank gathered the full entry."""

    entry: Entry
    moves: tuple[Move, ...]
    crossing: int
    total: int
    gathered: int


@dataclass(frozen=True)
class ReshardPlanner:
    """Plans the moves of entries between one training layout and one set of engines.

    Args:
        owner: pipeline stage of each layer index, and of each row name outside layers.
        engines: for each engine, the training rank that hosts each of its tensor-parallel ranks.
        uncut_rows: names of rows that every training rank holds in full, although the table shards
            them.
    """

    shape: ModelShape
    layout: Layout
    owner: Mapping[object, int]
    engines: Sequence[Sequence[int]]
    vocab_multiple: int = 64
    uncut_rows: Collection[str] = ()
    expert_parallel: int = 1

    def plan(self, entry: Entry) -> Reshard:
        shards = self._shards(entry.row)
        held = _source_pieces(entry, self.shape, shards)
        holders = self._holders(entry, shards)
        moves: list[Move] = []
        slot = 0
        for engine in self.engines:
            for rank, host in enumerate(engine):
                needed = engine_blocks(
                    entry, self.shape, rank, len(engine), self.vocab_multiple, self.expert_parallel
                )
                moves += _moves(held, holders, needed, host, slot)
                slot += 1
        # lengths are counted along the cut dimension; the other dimensions move in full
        whole = entry.row.shapes[0]
        per_row = math.prod(whole) // whole[entry.cut_dim]
        crossing = sum(move.length for move in moves if move.source != move.destination)
        total = sum(move.length for move in moves)
        # to gather, each rank receives all that it does not hold: ``copies`` full entries are held
        length = sum(part[entry.cut_dim] for part in entry.row.shapes)
        copies = sum(len(ranks) for ranks in holders.values()) / shards
        gathered = round((self.layout.world - copies) * length)
        return Reshard(entry, tuple(moves), crossing * per_row, total * per_row, gathered * per_row)

    def _shards(self, row: Row) -> int:
        if row.dim is None or row.name in self.uncut_rows:
            return 1
        return self.layout.etp if row.group == "etp" else self.layout.tp

    def _holders(self, entry: Entry, shards: int) -> dict[int, list[int]]:
        key = entry.row.name if entry.layer is None else entry.layer
        holders: dict[int, list[int]] = {}
        for rank in range(self.layout.world):
            here = self.layout.coordinates(rank)
            if here.pp != self.owner[key]:
                continue
            if entry.expert is not None:
                if entry.expert // (self.shape.num_experts // self.layout.ep) != here.ep:
                    continue
                shard = here.etp
            else:
                shard = here.tp
            holders.setdefault(shard if shards > 1 else 0, []).append(rank)
        return holders


def engine_blocks(
    entry: Entry,
    shape: ModelShape,
    rank: int,
    size: int,
    vocab_multiple: int = 64,
    expert_parallel: int = 1,
) -> tuple[Block, ...]:
    """The blocks of an entry that tensor-parallel rank ``rank`` of ``size`` of an engine holds.

    Queries, keys and values are stacked, each cut by heads; key-value heads are repeated if there
    are more ranks than heads. MLA's down projections, routers and norms are replicated.
    Neighbouring ranks form ``expert_parallel`` groups. Each group holds the same number of experts,
    in order, and shards them over its ranks; a rank holds nothing of other groups' experts.
    """
    row = entry.row
    if entry.expert is not None:
        size //= expert_parallel
        group, rank = divmod(rank, size)
        if entry.expert * expert_parallel // shape.num_experts != group:
            return ()
    lengths = tuple(part[entry.cut_dim] for part in row.shapes)
    if row.dim is None or row.name.endswith(_REPLICATED):
        return tuple(Block(source, 0, length) for source, length in enumerate(lengths))
    if row.kind == "qkv":
        queries, keys, _ = lengths
        head = keys // shape.kv_heads
        if shape.kv_heads >= size:
            first, length = rank * keys // size, keys // size
        else:
            first, length = rank * shape.kv_heads // size * head, head
        return (
            Block(0, rank * queries // size, queries // size),
            Block(1, first, length),
            Block(2, first, length),
        )
    padded = 0
    if row.kind == "vocab":
        padded = padded_vocab_size(padded_vocab_size(lengths[0], vocab_multiple), size)
    return shard_blocks(row.kind, lengths, rank, size, shape.kv_heads, padded)


def _source_pieces(entry: Entry, shape: ModelShape, size: int) -> dict[int, list[SourcePiece]]:
    """For each source tensor, the pieces that the ``size`` shards hold, in order."""
    padded = padded_vocab_size(shape.vocab, size) if entry.row.kind == "vocab" else 0
    pieces: dict[int, list[SourcePiece]] = {}
    for shard in range(size):
        offset = 0
        for block in entry.blocks(shard, size, shape.kv_heads, padded):
            if block.source != ZERO:
                piece = (block.start, block.length, shard, offset)
                pieces.setdefault(block.source, []).append(piece)
            offset += block.length
    return {source: sorted(found) for source, found in pieces.items()}


def _moves(
    held: Mapping[int, list[SourcePiece]],
    holders: Mapping[int, list[int]],
    needed: Sequence[Block],
    host: int,
    slot: int,
) -> Iterator[Move]:
    offset = 0
    for block in needed:
        if block.source != ZERO:  # the engine fills its padding itself
            for start, length, shard, at in held[block.source]:
                begin = max(start, block.start)
                end = min(start + length, block.start + block.length)
                if begin < end:
                    ranks = holders[shard]
                    # the host's own shard costs nothing; else spread the load over the replicas
                    source = host if host in ranks else ranks[host % len(ranks)]
                    at_source, at_host = at + begin - start, offset + begin - block.start
                    yield Move(source, at_source, host, at_host, end - begin, slot)
        offset += block.length


@dataclass(frozen=True)
class EngineTensor:
    """One entry inside a parameter of a rollout rank.

    Args:
        name: SGLang's name of the parameter.
        shape: of the full parameter on that rank.
        expert: index along the parameter's first dimension; None: it holds no experts.
        first: first index of the entry along its ``cut_dim`` (within its expert).
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None
    first: int


def engine_tensor(
    entry: Entry,
    shape: ModelShape,
    rank: int,
    size: int,
    vocab_multiple: int = 64,
    expert_parallel: int = 1,
) -> EngineTensor:
    """The place of an entry on tensor-parallel rank ``rank`` of ``size``, which holds a part of it.

    Args:
        vocab_multiple: the engine pads its vocabulary to a multiple of this.
        expert_parallel: groups of the engine's ranks among which its experts are divided.
    """
    row, dim = entry.row, entry.cut_dim
    blocks = engine_blocks(entry, shape, rank, size, vocab_multiple, expert_parallel)
    assert blocks
    first, length = 0, sum(block.length for block in blocks)
    if row.fuse_group == "a":  # the down projection of queries, then that of keys and values
        assert shape.mla is not None
        assert shape.mla.q_lora_rank is not None
        queries = shape.mla.q_lora_rank
        keys = shape.mla.kv_lora_rank + shape.mla.qk_rope_head_dim
        first, length = (0 if ".q_a_proj." in entry.hf[0] else queries), queries + keys
    full = row.shapes[0]
    local = (*full[:dim], length, *full[dim + 1 :])
    expert = entry.expert
    if expert is not None:
        experts = shape.num_experts // expert_parallel
        expert, local = expert % experts, (experts, *local)
    return EngineTensor(_engine_name(entry), local, expert, first)


def _engine_name(entry: Entry) -> str:
    row, name = entry.row, entry.hf[0]
    if entry.expert is not None:
        layer = name[: name.index(f".experts.{entry.expert}.")]
        return f"{layer}.experts.{'w13' if row.kind == 'gated' else 'w2'}_weight"
    if row.kind == "qkv":
        return name.replace(".q_proj.", ".qkv_proj.")
    if row.kind == "gated":
        return name.replace(".gate_proj.", ".gate_up_proj.")
    if row.fuse_group == "a":
        return f"{name.rsplit('.', 2)[0]}.fused_qkv_a_proj_with_mqa.weight"
    return name

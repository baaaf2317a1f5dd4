"""From a training layout to a rollout engine's layout: which parts of which shards move where.

Both layouts are lists of blocks of the same Hugging Face tensors, so the plan is the intersection
of their intervals. A destination rank takes from its own shard every element that the shard holds;
so the fewest possible elements cross ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mppo.parallel.layout import Layout
from mppo.weights.blocks import ZERO, Block, padded_vocab_size, shard_blocks
from mppo.weights.rows import Row
from mppo.weights.shape import ModelShape
from mppo.weights.table import Entry

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
        per_row = _elements_per_row(entry)
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
    if row.dim is None or _is_replicated_in_engine(row):
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


def _is_replicated_in_engine(row: Row) -> bool:
    return row.name.endswith(("linear_q_down_proj.weight", "linear_kv_down_proj.weight"))


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


def _elements_per_row(entry: Entry) -> int:
    shape, count = entry.row.shapes[0], 1
    for dim, length in enumerate(shape):
        if dim != entry.cut_dim:
            count *= length
    return count

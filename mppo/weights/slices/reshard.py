"""From a training layout to a rollout engine's: which bytes go where.

Both sides are lists of blocks of the same Hugging Face tensors, so a plan is their interval
intersection. Every destination byte comes from the destination's own rank where that rank holds it;
what crosses ranks is therefore the least possible.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mppo.parallel.layout import Layout
from mppo.weights.blocks import ZERO, Block, padded_vocab_size, shard_blocks
from mppo.weights.shape import ModelShape
from mppo.weights.table import Entry, Row, Table


@dataclass(frozen=True)
class Move:
    """``length`` rows (columns where the entry is cut along dimension 1) of one parameter.

    Offsets are within the shards of source and destination, along the entry's ``cut_dim``.
    ``source`` and ``destination`` are training ranks; ``slot`` is the rollout rank that is served,
    counted over the engines.
    """

    source: int
    source_offset: int
    destination: int
    destination_offset: int
    length: int
    slot: int


@dataclass(frozen=True)
class Reshard:
    """The moves of one entry.

    Args:
        entry: the parameter.
        moves: what fills the engine's shards; ranks are training ranks.
        crossing: elements that move between different ranks.
        total: elements the engines' shards hold, padding left out.
        gathered: elements that move where every training rank is brought the whole entry.
    """

    entry: Entry
    moves: tuple[Move, ...]
    crossing: int
    total: int
    gathered: int


def plan_reshard(
    table: Table,
    layout: Layout,
    owner: Mapping[object, int],
    engines: Sequence[Sequence[int]],
    vocab_multiple: int = 64,
    whole: Collection[str] = (),
    expert_parallel: int = 1,
) -> Iterator[Reshard]:
    """Plan the moves of every entry.

    Args:
        table: the model's parameter table.
        layout: the training layout.
        owner: pipeline stage of each layer index and of each end's row name.
        engines: for each engine, the training rank that hosts each of its tensor ranks.
        vocab_multiple: the engine pads its vocabulary to a multiple of this.
        whole: names of rows that the training ranks hold whole though the table cuts them.
        expert_parallel: groups of an engine's ranks that share the experts out.

    Yields:
        One plan per entry, in the table's order.
    """
    for entry in table.entries():
        yield plan_entry(
            entry, table.shape, layout, owner, engines, vocab_multiple, whole, expert_parallel
        )


def plan_entry(
    entry: Entry,
    shape: ModelShape,
    layout: Layout,
    owner: Mapping[object, int],
    engines: Sequence[Sequence[int]],
    vocab_multiple: int = 64,
    whole: Collection[str] = (),
    expert_parallel: int = 1,
) -> Reshard:
    """The moves of one entry; arguments as ``plan_reshard``."""
    shards = 1 if entry.row.name in whole else _group_size(entry.row, layout)
    held = _source_shards(entry, shape, shards)
    holders = _holders(entry, shape, layout, owner, shards)
    per_row = _elements_per_row(entry)
    moves: list[Move] = []
    slot = 0
    for engine in engines:
        for rank, host in enumerate(engine):
            wanted = engine_blocks(entry, shape, rank, len(engine), vocab_multiple, expert_parallel)
            moves += _moves(held, holders, wanted, host, slot)
            slot += 1
    crossing = sum(move.length for move in moves if move.source != move.destination)
    total = sum(move.length for move in moves)
    length = sum(part[entry.cut_dim] for part in entry.row.shapes)
    copies = sum(len(ranks) for ranks in holders.values()) / shards
    gathered = round((layout.world - copies) * length)
    return Reshard(entry, tuple(moves), crossing * per_row, total * per_row, gathered * per_row)


def engine_blocks(
    entry: Entry,
    shape: ModelShape,
    rank: int,
    size: int,
    vocab_multiple: int = 64,
    expert_parallel: int = 1,
) -> tuple[Block, ...]:
    """What tensor rank ``rank`` of ``size`` of a rollout engine holds of an entry.

    Queries, keys and values are stacked, each cut by heads, keys and values repeated where there
    are more ranks than heads; latent down projections, routers and norms are whole on every rank.
    Neighbouring ranks form ``expert_parallel`` groups; each holds as many experts, in order, and
    cuts them within: a rank holds nothing of another group's.
    """
    row = entry.row
    if entry.expert is not None:
        size //= expert_parallel
        group, rank = divmod(rank, size)
        if entry.expert * expert_parallel // shape.num_experts != group:
            return ()
    lengths = tuple(part[entry.cut_dim] for part in row.shapes)
    if row.dim is None or _is_whole_in_engine(row):
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


def _is_whole_in_engine(row: Row) -> bool:
    return row.name.endswith(("linear_q_down_proj.weight", "linear_kv_down_proj.weight"))


def _group_size(row: Row, layout: Layout) -> int:
    if row.dim is None:
        return 1
    return layout.etp if row.group == "etp" else layout.tp


def _source_shards(
    entry: Entry, shape: ModelShape, size: int
) -> dict[int, list[tuple[int, int, int, int]]]:
    """For each source tensor: (start, length, shard, offset in it) of the pieces held."""
    padded = padded_vocab_size(shape.vocab, size) if entry.row.kind == "vocab" else 0
    pieces: dict[int, list[tuple[int, int, int, int]]] = {}
    for shard in range(size):
        offset = 0
        for block in entry.blocks(shard, size, shape.kv_heads, padded):
            if block.source != ZERO:
                piece = (block.start, block.length, shard, offset)
                pieces.setdefault(block.source, []).append(piece)
            offset += block.length
    return {source: sorted(found) for source, found in pieces.items()}


def _holders(
    entry: Entry, shape: ModelShape, layout: Layout, owner: Mapping[object, int], shards: int
) -> dict[int, list[int]]:
    """Training ranks that hold each shard of the entry."""
    key = entry.row.name if entry.layer is None else entry.layer
    holders: dict[int, list[int]] = {}
    for rank in range(layout.world):
        here = layout.coordinates(rank)
        if here.pp != owner[key]:
            continue
        if entry.expert is not None:
            if entry.expert // (shape.num_experts // layout.ep) != here.ep:
                continue
            shard = here.etp
        else:
            shard = here.tp
        holders.setdefault(shard if shards > 1 else 0, []).append(rank)
    return holders


def _moves(
    held: Mapping[int, list[tuple[int, int, int, int]]],
    holders: Mapping[int, list[int]],
    wanted: Sequence[Block],
    host: int,
    slot: int,
) -> Iterator[Move]:
    offset = 0
    for block in wanted:
        if block.source != ZERO:
            for start, length, shard, at in held[block.source]:
                begin = max(start, block.start)
                end = min(start + length, block.start + block.length)
                if begin < end:
                    ranks = holders[shard]
                    source = host if host in ranks else ranks[host % len(ranks)]
                    at_source, at_host = at + begin - start, offset + begin - block.start
                    yield Move(source, at_source, host, at_host, end - begin, slot)
        offset += block.length


def _elements_per_row(entry: Entry) -> int:
    """Elements of one step along the cut dimension."""
    shape, count = entry.row.shapes[0], 1
    for dim, length in enumerate(shape):
        if dim != entry.cut_dim:
            count *= length
    return count

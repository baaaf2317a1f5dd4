"""A weight loader for slices of parameters; it runs inside the SGLang servers that mppo starts.

SGLang calls ``load(model, named_tensors)`` (its ``custom_weight_loader`` option) on each rank of a
server with the bytes for that rank, and a table: for each slice its parameter, its place in the
parameter, and its bytes, all of them or only changed blocks. An exception here would end the
server, so errors are written to the file that the table gives; the trainer reads it after each
bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from mppo.rollout.transport.checked_load import json_table, load_reported, tensor_checksum
from mppo.safety.input_error import InputError
from mppo.weights.bucket import aligned
from mppo.weights.slices.message_bytes import ALL_BLOCKS, BLOCK, INDEX_BYTES

SLICE_LOADER = "mppo.rollout.transport.slice_load.load"
_DERIVED = ".kv_b_proj."
"""SGLang's MLA copies parts of this parameter, and must copy them again after a change."""


@dataclass(frozen=True)
class PieceRow:
    """A slice of a parameter.

    Args:
        expert: index along the parameter's first dimension; None: it holds no experts.
        dim, offset: dimension along which the slice is cut, and its first index.
        begin: its first byte in the message.
        checksum: of all its bytes after loading; None: not verified.
    """

    name: str
    parameter_shape: Sequence[int]
    expert: int | None
    dim: int
    offset: int
    shape: Sequence[int]
    dtype: str
    begin: int
    checksum: tuple[int, int] | None = None


@dataclass(frozen=True)
class MessageRow:
    """A message: its bytes in the bucket, its number of blocks (or ``ALL_BLOCKS``), its pieces."""

    start: int
    end: int
    blocks: int
    pieces: Sequence[PieceRow]


def slice_table(messages: Sequence[MessageRow], report: Path) -> Tensor:
    """The table of a bucket for one rank, see ``json_table``."""
    rows = [
        (m.start, m.end, m.blocks, [list(vars(piece).values()) for piece in m.pieces])
        for m in messages
    ]
    return json_table(report, rows=rows)


def load(model: nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Load a bucket; errors are written to the report."""

    def step(table: dict[str, Any], content: Tensor) -> None:
        _check_order(model)
        held = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        written: list[str] = []
        for start, end, blocks, rows in table["rows"]:
            message = MessageRow(start, end, blocks, [PieceRow(*row) for row in rows])
            written += _load(held, content[start:end], message)
        derived = [name for name in written if _DERIVED in name]
        if derived and hasattr(model, "post_load_weights"):
            post_load_weights = cast("Callable[..., object]", model.post_load_weights)
            post_load_weights(weight_names=derived)

    load_reported(named_tensors, step)


def _check_order(model: nn.Module) -> None:
    """Check that fused parameters have the order of ``mppo.weights.slices.reshard``; the
    shapes are the same in either order."""
    for name, module in model.named_modules():
        kernel = getattr(module, "quant_method", None)
        if getattr(kernel, "load_up_proj_weight_first", False):
            raise InputError(
                f"SGLang's kernel for {name} stores the up projection before the gate, while "
                "slices have the gate first: set rollout.sync_mode to full, or "
                "rollout.server_args.moe_runner_backend to triton"
            )


@torch.no_grad()
def _load(held: dict[str, Tensor], flat: Tensor, message: MessageRow) -> list[str]:
    """Write a message's pieces into the parameters; return the names of those that changed."""
    written = []
    index = blocks = flat
    bounds: list[int] = []
    if message.blocks != ALL_BLOCKS:
        index = flat[: message.blocks * INDEX_BYTES].view(torch.int32)
        blocks = flat[len(flat) - message.blocks * BLOCK :].view(-1, BLOCK)
        # the indices are sorted: find which of them belong to each piece
        ends = [piece.begin // BLOCK for piece in message.pieces[1:]]
        edges = torch.tensor(ends, dtype=torch.int32, device=flat.device)
        bounds = [0, *torch.searchsorted(index, edges).tolist(), message.blocks]
    for number, piece in enumerate(message.pieces):
        target = _slice_of(held, piece)
        if message.blocks == ALL_BLOCKS:
            content = flat[piece.begin : piece.begin + target.numel() * _dtype(piece).itemsize]
        else:
            first, last = bounds[number], bounds[number + 1]
            if first == last and piece.checksum is None:
                continue  # nothing changed, nothing to verify
            places = (index[first:last] - piece.begin // BLOCK).long()
            content = _patched(target, piece, places, blocks[first:last])
        if piece.checksum is not None and list(tensor_checksum(content)) != list(piece.checksum):
            raise InputError(f"verify_sync: {piece.name} would differ from the trainer's")
        target.copy_(content.view(_dtype(piece)).view(list(piece.shape)))
        written.append(piece.name)
    return written


def _dtype(piece: PieceRow) -> torch.dtype:
    return getattr(torch, piece.dtype)


def _slice_of(held: dict[str, Tensor], piece: PieceRow) -> Tensor:
    parameter = held.get(piece.name)
    if parameter is None:
        raise InputError(
            f"SGLang's model has no parameter {piece.name}, so slices cannot be loaded: set "
            "rollout.sync_mode to full"
        )
    if list(parameter.shape) != list(piece.parameter_shape):
        raise InputError(
            f"{piece.name} has shape {list(parameter.shape)} on a rank of SGLang, not "
            f"{list(piece.parameter_shape)}, so slices do not fit: set rollout.sync_mode to full"
        )
    tensor = parameter.detach() if piece.expert is None else parameter.detach()[piece.expert]
    return tensor.narrow(piece.dim, piece.offset, piece.shape[piece.dim])


def _patched(target: Tensor, piece: PieceRow, places: Tensor, blocks: Tensor) -> Tensor:
    """The bytes that ``target`` holds, with some blocks replaced: uint8. A parameter of a dtype
    narrower than the piece's no longer holds the bytes that were sent before: InputError."""
    if torch.promote_types(target.dtype, _dtype(piece)) != target.dtype:
        raise InputError(
            f"{piece.name} is {target.dtype} in SGLang, which rounds the {piece.dtype} sent, so "
            "changed blocks cannot be patched in: set rollout.sync_mode to sliced"
        )
    held = target.to(_dtype(piece)).contiguous().flatten().view(torch.uint8)
    padded = held.new_zeros(aligned(len(held), BLOCK))
    padded[: len(held)] = held
    padded.view(-1, BLOCK)[places] = blocks
    return padded[: len(held)]

"""A weight loader that runs inside mppo's own SGLang servers and takes pieces of parameters.

SGLang calls ``load(model, named_tensors)`` (its ``custom_weight_loader`` option) on each rank of a
server with that rank's own bytes, and a table that says where they go: into which stretch of which
of the rank's parameters, whole or block by block. Whatever is wrong is written to the file the
table names, where the trainer looks after each bucket: an exception here would end the server.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mppo.rollout.transport.checked_load import BYTES, TABLE, tensor_checksum
from mppo.weights.slices.source import BLOCK, INDEX_BYTES, WHOLE

SLICE_LOADER = "mppo.rollout.transport.slice_load.load"
_DERIVED = ".kv_b_proj."
"""SGLang's MLA multiplies by parts of this parameter that it copies."""


@dataclass(frozen=True)
class PieceRow:
    """A stretch of a parameter.

    Args:
        name: SGLang's name of the parameter.
        whole: the parameter's shape on this rank.
        expert: index along its first dimension; None: it holds no experts.
        dim, offset: where the stretch begins.
        shape: of the stretch.
        dtype: of its bytes.
        begin: where they begin in the message.
        checksum: of all of them once it is loaded; None: not to be checked.
    """

    name: str
    whole: Sequence[int]
    expert: int | None
    dim: int
    offset: int
    shape: Sequence[int]
    dtype: str
    begin: int
    checksum: tuple[int, int] | None = None


@dataclass(frozen=True)
class MessageRow:
    """A message: its bytes in the bucket, how many blocks it has (``WHOLE``: all), its pieces."""

    start: int
    end: int
    blocks: int
    pieces: Sequence[PieceRow]


def slice_table(messages: Sequence[MessageRow], report: Path) -> Tensor:
    """What a bucket for one rank holds, as JSON bytes: uint8 on the CPU.

    Args:
        messages: what it holds.
        report: file for whatever is wrong.
    """
    rows = [
        (m.start, m.end, m.blocks, [list(vars(piece).values()) for piece in m.pieces])
        for m in messages
    ]
    content = {"report": str(report), "rows": rows}
    return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


def load(model: nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Load a bucket; a fault is written to the report."""
    received = dict(named_tensors)
    content = json.loads(received[TABLE].cpu().numpy().tobytes())
    try:
        _check_order(model)
        held = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        written: list[str] = []
        for start, end, blocks, rows in content["rows"]:
            message = MessageRow(start, end, blocks, [PieceRow(*row) for row in rows])
            written += _load(held, received[BYTES][start:end], message)
        derived = [name for name in written if _DERIVED in name]
        if derived and hasattr(model, "post_load_weights"):
            model.post_load_weights(weight_names=derived)
    except Exception as error:
        with Path(content["report"]).open("a") as report:
            report.write(f"{type(error).__name__}: {error}\n")


def _check_order(model: nn.Module) -> None:
    """Stacks are in the order of ``mppo.weights.slices.engine_tensors``, which shapes do not tell.

    Raises:
        ValueError: some kernel of SGLang wants another.
    """
    for name, module in model.named_modules():
        kernel = getattr(module, "quant_method", None)
        if getattr(kernel, "load_up_proj_weight_first", False):
            raise ValueError(
                f"{name} holds up before gate in SGLang: set rollout.sync_mode to full, or "
                "rollout.server_args.moe_runner_backend to triton"
            )


@torch.no_grad()
def _load(held: dict[str, Tensor], flat: Tensor, message: MessageRow) -> list[str]:
    """Write a message's pieces; the names of the parameters that changed.

    Raises:
        ValueError: names the first piece that has no such place, or is not as sent.
    """
    written = []
    if message.blocks != WHOLE:
        index = flat[: message.blocks * INDEX_BYTES].view(torch.int32)
        blocks = flat[len(flat) - message.blocks * BLOCK :].view(-1, BLOCK)
        ends = [piece.begin // BLOCK for piece in message.pieces[1:]]
        edges = torch.tensor(ends, dtype=torch.int32, device=flat.device)
        bounds = [0, *torch.searchsorted(index, edges).tolist(), message.blocks]
    for number, piece in enumerate(message.pieces):
        target = _stretch(held, piece)
        if message.blocks == WHOLE:
            content = flat[piece.begin : piece.begin + target.numel() * _dtype(piece).itemsize]
        else:
            first, last = bounds[number], bounds[number + 1]
            if first == last and piece.checksum is None:
                continue
            places = (index[first:last] - piece.begin // BLOCK).long()
            content = _patched(target, piece, places, blocks[first:last])
        if piece.checksum is not None and list(tensor_checksum(content)) != list(piece.checksum):
            raise ValueError(f"verify_sync: {piece.name} would not be what the trainer holds")
        target.copy_(content.view(_dtype(piece)).view(list(piece.shape)))
        written.append(piece.name)
    return written


def _dtype(piece: PieceRow) -> torch.dtype:
    return getattr(torch, piece.dtype)


def _stretch(held: dict[str, Tensor], piece: PieceRow) -> Tensor:
    """The part of this rank's parameter a piece is for.

    Raises:
        ValueError: SGLang keeps the parameter otherwise.
    """
    parameter = held.get(piece.name)
    if parameter is None:
        raise ValueError(
            f"SGLang's model has no parameter {piece.name}: set rollout.sync_mode to full"
        )
    if list(parameter.shape) != list(piece.whole):
        raise ValueError(
            f"{piece.name} has shape {list(parameter.shape)} on a rank of SGLang, not "
            f"{list(piece.whole)}: set rollout.sync_mode to full"
        )
    whole = parameter.detach() if piece.expert is None else parameter.detach()[piece.expert]
    return whole.narrow(piece.dim, piece.offset, piece.shape[piece.dim])


def _patched(target: Tensor, piece: PieceRow, places: Tensor, blocks: Tensor) -> Tensor:
    """What the stretch holds, with some of its blocks replaced, as bytes.

    Raises:
        ValueError: the parameter's type cannot hold what was sent before.
    """
    if torch.promote_types(target.dtype, _dtype(piece)) != target.dtype:
        raise ValueError(
            f"{piece.name} is {target.dtype} in SGLang, which rounds the {piece.dtype} sent: "
            "set rollout.sync_mode to sliced"
        )
    held = target.to(_dtype(piece)).contiguous().flatten().view(torch.uint8)
    padded = held.new_zeros(-(-len(held) // BLOCK) * BLOCK)
    padded[: len(held)] = held
    padded.view(-1, BLOCK)[places] = blocks
    return padded[: len(held)]

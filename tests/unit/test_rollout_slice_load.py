"""Slices are written into their parameters block by block, or the report gives the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from mppo.rollout.transport.checked_load import BYTES, TABLE, tensor_checksum
from mppo.rollout.transport.slice_load import MessageRow, PieceRow, load, slice_table
from mppo.weights.slices.message_bytes import ALL_BLOCKS, BLOCK, block_message

COLUMNS = PieceRow("mlp.down_proj.weight", (3, 40), None, 1, 30, (3, 10), "float32", 0)
EXPERT = PieceRow("mlp.experts.w13_weight", (2, 8, 4), 1, 0, 4, (4, 4), "float32", 128)
SHORT = PieceRow("norm.weight", (5,), None, 0, 0, (5,), "bfloat16", 192)
PIECES = [COLUMNS, EXPERT, SHORT]
TOTAL = 192 + BLOCK


class Server(nn.Module):
    """Parameters of one rank; records which derived parameters were requested."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {
            "mlp.down_proj.weight": torch.zeros(3, 40),
            "mlp.experts.w13_weight": torch.zeros(2, 8, 4),
            "norm.weight": torch.zeros(5),
            "attn.kv_b_proj.weight": torch.zeros(4),
        }
        self.derived: list[str] = []

    def named_parameters(self, *args: object, **kwargs: object):
        return iter(self.held.items())

    def post_load_weights(self, weight_names: list[str]) -> None:
        self.derived += weight_names

    def stretches(self) -> list[Tensor]:
        held = self.held
        return [
            held["mlp.down_proj.weight"][:, 30:],
            held["mlp.experts.w13_weight"][1, 4:],
            held["norm.weight"],
        ]


def _packed(tensors: list[Tensor]) -> Tensor:
    """Bytes of a message with everything in it."""
    flat = torch.zeros(TOTAL, dtype=torch.uint8)
    for piece, tensor in zip(PIECES, tensors, strict=True):
        content = tensor.to(getattr(torch, piece.dtype)).contiguous().flatten().view(torch.uint8)
        flat[piece.begin : piece.begin + len(content)] = content
    return flat


def _values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [piece.shape for piece in PIECES]
    return [torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes]


def _reported(
    server: Server, report: Path, content: Tensor, blocks: int, pieces: list[PieceRow]
) -> str:
    """The report after a message."""
    described = slice_table([MessageRow(0, len(content), blocks, pieces)], report)
    load(server, [(BYTES, content), (TABLE, described)])
    return report.read_text() if report.exists() else ""


def test_the_first_update_writes_everything_and_later_ones_only_changes(tmp_path) -> None:
    server, first, second = Server(), _values(1), _values(1)
    before = _packed(first)
    assert _reported(server, tmp_path / "report", before, ALL_BLOCKS, PIECES) == ""
    for held, sent in zip(server.stretches(), first, strict=True):
        assert torch.equal(held, sent)
    second[0][2, 9] += 1
    second[2][4] += 1
    after = _packed(second)
    changed = (after != before).view(-1, BLOCK).any(1)
    blocks, content = block_message(after, changed, [(0, TOTAL)])
    assert (blocks, len(content)) == (2, 3 * BLOCK)
    checked = [
        replace(piece, checksum=tensor_checksum(after[piece.begin :][: held.numel() * size]))
        for piece, held, size in zip(PIECES, server.stretches(), (4, 4, 2), strict=True)
    ]
    assert _reported(server, tmp_path / "report", content, blocks, checked) == ""
    for held, sent in zip(server.stretches(), second, strict=True):
        assert torch.equal(held, sent)
    assert server.held["mlp.down_proj.weight"][:, :30].eq(0).all()
    assert server.held["mlp.experts.w13_weight"][0].eq(0).all()
    server.held["mlp.experts.w13_weight"][1, 7, 3] += 1
    reported = _reported(server, tmp_path / "report", content, blocks, checked)
    assert "verify_sync: mlp.experts.w13_weight would differ from the trainer's" in reported


def test_a_message_with_all_blocks_changed_is_sent_in_full() -> None:
    packed = torch.arange(4 * BLOCK, dtype=torch.uint8)
    changed = torch.ones(4, dtype=torch.bool)
    blocks, content = block_message(packed, changed, [(0, 2 * BLOCK), (3 * BLOCK, 4 * BLOCK)])
    assert blocks == ALL_BLOCKS
    assert torch.equal(content, packed.view(4, BLOCK)[[0, 1, 3]].flatten())
    assert block_message(packed, ~changed, [(0, 4 * BLOCK)])[0] == 0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"name": "mlp.up_proj.weight"}, "SGLang's model has no parameter mlp.up_proj.weight"),
        ({"parameter_shape": (3, 20)}, r"shape [3, 40] on a rank of SGLang, not [3, 20]"),
    ],
)
def test_a_parameter_of_another_shape_is_named(tmp_path, wrong: dict, why: str) -> None:
    pieces = [replace(COLUMNS, **wrong)]
    server = Server()
    reported = _reported(server, tmp_path / "report", _packed(_values(1))[:128], ALL_BLOCKS, pieces)
    assert why in reported
    assert "rollout.sync_mode" in reported
    assert server.held["mlp.down_proj.weight"].eq(0).all()


def test_kernels_with_up_before_gate_are_refused(tmp_path) -> None:
    server = Server()
    server.quant_method = SimpleNamespace(load_up_proj_weight_first=True)
    reported = _reported(server, tmp_path / "report", _packed(_values(1)), ALL_BLOCKS, PIECES)
    assert "set rollout.sync_mode to full" in reported
    assert server.held["mlp.down_proj.weight"].eq(0).all()


def test_a_rounded_parameter_is_not_updated_by_blocks(tmp_path) -> None:
    server = Server()
    server.held["mlp.down_proj.weight"] = torch.zeros(3, 40, dtype=torch.bfloat16)
    content = torch.zeros(2 * BLOCK, dtype=torch.uint8)
    assert "set rollout.sync_mode to sliced" in _reported(
        server, tmp_path / "report", content, 1, [COLUMNS]
    )


def test_derived_parameters_are_updated(tmp_path) -> None:
    latent = PieceRow("attn.kv_b_proj.weight", (4,), None, 0, 0, (4,), "float32", 0)
    server = Server()
    content = torch.ones(4).view(torch.uint8)
    assert _reported(server, tmp_path / "report", content, ALL_BLOCKS, [latent]) == ""
    assert server.derived == ["attn.kv_b_proj.weight"]

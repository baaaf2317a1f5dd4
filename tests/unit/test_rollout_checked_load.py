"""A server compares the received tensors, and its parameters, with the sent checksums."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mppo.rollout.transport import checked_load
from mppo.rollout.transport.buckets import SharedBuffer
from mppo.weights.bucket import WeightBucket

PLACES = {
    "attn.q_proj.weight": ("attn.qkv_proj.weight", slice(0, 8)),
    "attn.k_proj.weight": ("attn.qkv_proj.weight", slice(8, 10)),
    "attn.v_proj.weight": ("attn.qkv_proj.weight", slice(10, 12)),
    "mlp.gate_proj.weight": ("mlp.gate_up_proj.weight", slice(0, 3)),
    "mlp.up_proj.weight": ("mlp.gate_up_proj.weight", slice(4, 7)),  # each half is padded
    "mlp.experts.1.gate_proj.weight": ("mlp.experts.w13_weight", (1, slice(0, 3))),
    "mlp.experts.1.up_proj.weight": ("mlp.experts.w13_weight", (1, slice(3, 6))),
    "mlp.experts.1.down_proj.weight": ("mlp.experts.w2_weight", 1),
    "norm.weight": ("norm.weight", slice(None)),
}
"""Checkpoint names, and the server's parameters for them."""


class Server(nn.Module):
    """Fused parameters as SGLang has them; may load one tensor wrongly."""

    def __init__(self, forgets: str | None = None) -> None:
        super().__init__()
        self.forgets = forgets
        self.held = {
            "attn.qkv_proj.weight": nn.Parameter(torch.zeros(12, 4)),
            "mlp.gate_up_proj.weight": nn.Parameter(torch.zeros(8, 4)),
            "mlp.experts.w13_weight": nn.Parameter(torch.zeros(2, 6, 4)),
            "mlp.experts.w2_weight": nn.Parameter(torch.zeros(2, 4, 3)),
            "norm.weight": nn.Parameter(torch.zeros(4)),
        }

    def named_parameters(self, *args: object, **kwargs: object):
        return iter(self.held.items())

    @torch.no_grad()
    def load_weights(self, tensors: list[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            parameter, where = PLACES[name]
            if name != self.forgets:
                self.held[parameter][where] = tensor


def _bucket() -> list[tuple[str, Tensor]]:
    server, generator = Server(), torch.Generator().manual_seed(0)
    shapes = {
        name: server.held[parameter][where].shape for name, (parameter, where) in PLACES.items()
    }
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


def _loaded(server: Server, bucket, report: Path, checked: bool = True) -> str:
    """The report after a bucket was sent to a server."""
    buffer = SharedBuffer(torch.device("cpu"))
    buffer.fill(WeightBucket.pack(bucket))
    payload = buffer.own_payload(report, single_rank=True, checked=checked)
    checked_load.load(server, pickle.loads(base64.b64decode(payload)))
    return report.read_text() if report.exists() else ""


def test_a_good_bucket_is_loaded(tmp_path) -> None:
    server, bucket = Server(), _bucket()
    assert _loaded(server, bucket, tmp_path / "report") == ""
    for name, tensor in bucket:
        parameter, where = PLACES[name]
        assert torch.equal(server.held[parameter][where], tensor)


@pytest.mark.parametrize("name", PLACES)
def test_a_tensor_the_server_drops_is_named(tmp_path, name: str) -> None:
    reported = _loaded(Server(forgets=name), _bucket(), tmp_path / "report")
    assert (
        reported == f"ValueError: verify_sync: {name} was sent, but SGLang holds something else\n"
    )


def test_a_tensor_without_a_parameter_is_named(tmp_path) -> None:
    stranger = ("layers.0.mlp.gate_proj.weight", torch.ones(2, 2))
    reported = _loaded(Server(), [*_bucket(), stranger], tmp_path / "report")
    assert (
        "layers.0.mlp.gate_proj.weight was sent, but SGLang's model has no such tensor" in reported
    )


def test_a_servers_refusal_is_reported_without_checks_too(tmp_path) -> None:
    misshapen = [("norm.weight", torch.ones(5))]
    assert "RuntimeError" in _loaded(Server(), misshapen, tmp_path / "report", checked=False)


def test_checksums_depend_on_every_byte() -> None:
    flat = torch.randint(256, (37,), dtype=torch.uint8)
    before = checked_load.tensor_checksum(flat)
    for place in range(37):
        flat[place] ^= 4
        assert checked_load.tensor_checksum(flat) != before
        flat[place] ^= 4

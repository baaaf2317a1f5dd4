"""oneDNN computes the products of Megatron's linear layers, with the same numbers; no others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from megatron.core.tensor_parallel import layers

from mppo.cpu import onednn, products

if not onednn.is_available():
    pytest.skip("this build of torch has no oneDNN", allow_module_level=True)

LAYERS = {
    "LinearWithGradAccumulationAndAsyncCommunication": (None, False, False, False, None, 0, None),
    "LinearWithFrozenWeight": (None, False, None),
}
"""Megatron's functions with their arguments after input and weight (no bias, no parallelism)."""


@pytest.fixture
def sent(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes of what oneDNN multiplies; products of 5 x 6 by 6 x 7 are large enough here."""
    shapes = []
    linear = onednn.linear

    def noted(x, weight, bias=None):
        shapes.append(tuple(x.shape))
        return linear(x, weight, bias)

    monkeypatch.setattr(onednn, "linear", noted)
    monkeypatch.setattr(products, "_SMALLEST", 5 * 6 * 7)
    return shapes


@pytest.mark.parametrize("name", LAYERS)
def test_a_linear_layers_output_and_gradients_are_the_same(name: str, sent) -> None:
    torch.manual_seed(0)
    frozen = name == "LinearWithFrozenWeight"
    x = torch.randn(5, 1, 6, requires_grad=True)
    weight = torch.randn(7, 6, requires_grad=not frozen)
    grad = torch.randn(5, 1, 7)
    layer = products.with_products(getattr(layers, name))
    out = layer.apply(x, weight, *LAYERS[name])
    out.backward(grad)
    torch.testing.assert_close(out, x @ weight.T)
    torch.testing.assert_close(x.grad, grad @ weight)
    if not frozen:
        torch.testing.assert_close(weight.grad, grad[:, 0].T @ x[:, 0])
    assert set(sent) == {(5, 1, 6), (5, 1, 7)}


@pytest.mark.parametrize(
    "x",
    [torch.ones(4, 6), torch.ones(5, 6, dtype=torch.bfloat16), torch.ones(6, 5).T],
    ids=["small", "bfloat16", "transposed"],
)
def test_other_products_stay_as_they_are(x: torch.Tensor, sent) -> None:
    matrix = torch.ones(6, 7, dtype=x.dtype)
    assert torch.equal(products.product(x, matrix), x @ matrix)
    assert not sent


@pytest.mark.parametrize("faster", [True, False])
def test_megatrons_layers_are_replaced_where_it_is_faster(faster: bool, monkeypatch) -> None:
    for name in LAYERS:  # restored at the end
        monkeypatch.setattr(layers, name, getattr(layers, name))
    before = {name: getattr(layers, name) for name in LAYERS}
    monkeypatch.setattr(products, "is_faster", lambda: faster)
    monkeypatch.setattr(onednn, "keep_few_kernels", lambda: None)
    products.install.__wrapped__()
    for name, layer in before.items():
        now = getattr(layers, name)
        assert issubclass(now, layer)
        assert (now is not layer) == faster


KEPT = """
import ctypes, os
from mppo.cpu import onednn
before = dict(os.environ)
onednn.keep_few_kernels()
assert dict(os.environ) == before
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(getenv(b"ONEDNN_PRIMITIVE_CACHE_CAPACITY"), getenv(b"LRU_CACHE_CAPACITY"))
"""


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, "b'256' b'256'"),
        ({"LRU_CACHE_CAPACITY": "7"}, "b'256' b'7'"),
        ({"DNNL_PRIMITIVE_CACHE_CAPACITY": "7"}, "None b'256'"),
    ],
)
def test_few_kernels_are_kept_in_this_process_unless_the_user_said(given, kept) -> None:
    process = subprocess.run(
        [sys.executable, "-c", KEPT], env=os.environ | given, capture_output=True, text=True
    )
    assert process.stdout.strip() == kept, process.stderr

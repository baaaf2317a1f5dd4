"""Linear layers whose weights lie as the CPU's kernels read them, for decoding.

Decoding multiplies a few rows with every weight once a token. Between two tokens a weight leaves
the processor's caches, and a product that rearranges it on the way reads it at a tenth of the
memory's rate. oneDNN can rearrange it once, ahead of all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_PRODUCTS = 16
"""Packing a weight takes as long as 3 to 9 products with a few rows save."""


@contextmanager
def packed_linears(model: nn.Module, rows: int, products: int) -> Iterator[None]:
    """Multiply by packed copies of the linear layers' weights, which are kept until the end.

    Does nothing on a GPU, or where ``products`` are too few to pay for the packing.

    Args:
        model: a model in inference mode whose weights do not change meanwhile.
        rows: rows of most products; others are right, too.
        products: products to come with every weight.
    """
    layers = [m for m in model.modules() if type(m) is nn.Linear and m.weight.device.type == "cpu"]
    if products < _PRODUCTS or not torch.backends.mkldnn.is_available():
        layers = []
    for layer in layers:
        layer.forward = _Product(layer, rows)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


class _Product:
    """The product with one layer's weight as it is now."""

    def __init__(self, layer: nn.Linear, rows: int) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight, rows)
        self._bias = layer.bias

    def __call__(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``: ``[..., in]`` to ``[..., out]``."""
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

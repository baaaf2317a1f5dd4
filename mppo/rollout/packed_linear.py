"""Linear layers whose weights lie as the CPU's kernels read them, for decoding.

Decoding multiplies a few rows with every weight once a token. Between two tokens a weight leaves
the processor's caches, and a product that rearranges it on the way reads it at a tenth of the
memory's rate. oneDNN can rearrange it once, ahead of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mppo.parallel import onednn

_PRODUCTS = 16
"""Packing a weight takes as long as 3 to 9 products with a few rows save."""

_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that multiply the same input: one product costs less than several."""


@contextmanager
def packed_linears(model: nn.Module, rows: int, products: int) -> Iterator[None]:
    """Multiply by packed copies of the linear layers' weights, which are kept until the end.

    Does nothing on a GPU, or where ``products`` are too few to pay for the packing.

    Args:
        model: a model in inference mode whose weights do not change meanwhile.
        rows: rows of most products; others are right, too.
        products: products to come with every weight.
    """
    groups = list(_groups(model))
    if products < _PRODUCTS or not onednn.is_available():
        groups = []
    for layers in groups:
        product = _Product(layers, rows)
        for place, layer in enumerate(layers):
            layer.forward = product.of(place)
    try:
        yield
    finally:
        for layers in groups:
            for layer in layers:
                del layer.forward


def _groups(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """The linear layers on the CPU, those that are multiplied together side by side."""
    for module in model.modules():
        layers = {
            name: layer
            for name, layer in module.named_children()
            if type(layer) is nn.Linear and layer.weight.device.type == "cpu"
        }
        for names in _JOINED:
            if all(name in layers for name in names):
                biased = {layers[name].bias is not None for name in names}
                if len(biased) == 1:
                    yield [layers.pop(name) for name in names]
        yield from ([layer] for layer in layers.values())


class _Product:
    """One product with the weights of layers that read the same input."""

    def __init__(self, layers: Sequence[nn.Linear], rows: int) -> None:
        weight = torch.cat([layer.weight for layer in layers])
        self._weight = onednn.pack(weight, rows)
        bias = layers[0].bias
        self._bias = None if bias is None else torch.cat([layer.bias for layer in layers])
        self._widths = [layer.out_features for layer in layers]
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def of(self, place: int) -> Callable[[Tensor], Tensor]:
        """What layer ``place`` computes: ``x @ weight.T + bias``, ``[..., in]`` to ``[..., out]``.

        The first layer that asks computes all; the others ask for the same tensor.
        """

        def forward(x: Tensor) -> Tensor:
            if x is not self._input:
                joined = onednn.linear(x, self._weight, self._bias)
                self._input, self._outputs = x, joined.split(self._widths, -1)
            return self._outputs[place]

        return forward

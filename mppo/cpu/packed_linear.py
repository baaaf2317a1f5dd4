"""Linear layers with weights packed for the CPU's kernels, for decoding.

Decoding multiplies a few rows with every weight once per token. Between two tokens a weight leaves
the processor's caches, and a product that repacks it on the fly reads it at a tenth of the memory
bandwidth. oneDNN can pack it once, before the first token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mppo.cpu import onednn

_PRODUCTS = 16
"""Products with a weight from which packing pays: it takes the time that 3 to 9 of them save."""

_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module with the same input: one joint product is faster than several."""


@contextmanager
def packed_linears(model: nn.Module, rows: int, products: int) -> Iterator[None]:
    """Multiply by packed copies of the linear layers' weights inside the context.

    It does nothing on a GPU, or if ``products`` are too few to pay for the packing.

    Args:
        model: a model in inference mode whose weights do not change inside the context.
        rows: the most frequent number of rows; others are slower, not wrong.
        products: number of products with every weight.
    """
    groups = list(_groups(model))
    if products < _PRODUCTS or not onednn.is_available():
        groups = []
    for layers in groups:
        product = _Product(layers, rows)
        for place, layer in enumerate(layers):
            vars(layer)["forward"] = product.of(place)
    try:
        yield
    finally:
        for layers in groups:
            for layer in layers:
                del layer.forward


def _groups(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """The linear layers on the CPU, grouped by joint product."""
    layers = dict.fromkeys(
        m for m in model.modules() if type(m) is nn.Linear and m.weight.device.type == "cpu"
    )
    for module in model.modules():
        for names in _JOINED:
            found = [getattr(module, name, None) for name in names]
            group = [x for x in found if isinstance(x, nn.Linear) and x in layers]
            if len(group) == len(names):
                kinds = {(x.in_features, x.weight.dtype, x.bias is None) for x in group}
                if len(kinds) == 1:
                    for layer in group:
                        del layers[layer]
                    yield group
    yield from ([layer] for layer in layers)


class _Product:
    """One product with the weights of layers that have the same input.

    Args:
        layers: the layers.
        rows: the most frequent number of rows.
    """

    def __init__(self, layers: Sequence[nn.Linear], rows: int) -> None:
        self._weight = onednn.pack_weight(_joined([layer.weight for layer in layers]), rows)
        self._bias = None if layers[0].bias is None else _joined([x.bias for x in layers])
        self._widths = [layer.out_features for layer in layers]
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def of(self, place: int) -> Callable[[Tensor], Tensor]:
        """Layer ``place``'s function ``x @ weight.T + bias``, ``[..., in]`` to ``[..., out]``.

        The first layer called with a tensor computes the outputs of all, and each layer takes its
        own once; the tensor must not be written to in between.
        """

        def forward(x: Tensor) -> Tensor:
            if len(self._widths) == 1:
                return onednn.linear(x, self._weight, self._bias)
            if x is not self._input or place not in self._outputs:
                joined = onednn.linear(x, self._weight, self._bias)
                self._input, self._outputs = x, dict(enumerate(joined.split(self._widths, -1)))
            output = self._outputs.pop(place)
            if not self._outputs:
                self._input = None
            return output

        return forward


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))

"""A pipeline stage with parameters of given names and shapes, and no computation."""

from __future__ import annotations

import torch


class FakeModule(torch.nn.Module):
    """A module that creates the children on a parameter's path."""

    def add(self, name: str, tensor: torch.Tensor, buffer: bool = False) -> None:
        head, _, rest = name.partition(".")
        if rest:
            if head not in self._modules:
                self.add_module(head, FakeModule())
            self.get_submodule(head).add(rest, tensor, buffer)
        elif buffer:
            self.register_buffer(head, tensor)
        else:
            self.register_parameter(head, torch.nn.Parameter(tensor))


def fake_stage(
    layers: list[dict[str, tuple[int, ...]]], ends: dict[str, tuple[int, ...]], first: int = 1
) -> FakeModule:
    """A model chunk with these parameters, filled with NaN.

    Args:
        layers: for each layer, the shapes of its parameters by name.
        ends: shapes of the parameters outside the layers, by name.
        first: number of the first layer.
    """
    chunk, decoder = FakeModule(), FakeModule()
    decoder.layers = torch.nn.ModuleList()
    for number, names in enumerate(layers, first):
        layer = FakeModule()
        layer.layer_number = number
        for name, shape in names.items():
            layer.add(name, torch.full(shape, torch.nan), name.endswith("expert_bias"))
        decoder.layers.append(layer)
    chunk.decoder = decoder
    for name, shape in ends.items():
        chunk.add(name, torch.full(shape, torch.nan))
    return chunk

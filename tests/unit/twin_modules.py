"""Modules that have a stage's parameters by name and shape, and nothing else."""

from __future__ import annotations

import torch


class Node(torch.nn.Module):
    """A module that grows children on the way to a parameter."""

    def put(self, name: str, tensor: torch.Tensor, buffer: bool = False) -> None:
        head, _, rest = name.partition(".")
        if rest:
            if head not in self._modules:
                self.add_module(head, Node())
            self.get_submodule(head).put(rest, tensor, buffer)
        elif buffer:
            self.register_buffer(head, tensor)
        else:
            self.register_parameter(head, torch.nn.Parameter(tensor))


def twin(
    layers: list[dict[str, tuple[int, ...]]], ends: dict[str, tuple[int, ...]], first: int = 1
) -> Node:
    """A chunk with these parameters, full of NaNs; layers are numbered from ``first``."""
    chunk, decoder = Node(), Node()
    decoder.layers = torch.nn.ModuleList()
    for number, names in enumerate(layers, first):
        layer = Node()
        layer.layer_number = number
        for name, shape in names.items():
            layer.put(name, torch.full(shape, torch.nan), name.endswith("expert_bias"))
        decoder.layers.append(layer)
    chunk.decoder = decoder
    for name, shape in ends.items():
        chunk.put(name, torch.full(shape, torch.nan))
    return chunk

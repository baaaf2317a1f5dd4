"""Offloaded activations: the same gradients, reused host memory, fetched ahead of their use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mppo.models.offload import offloaded_activations
from mppo.parallel.host_copies import HostCopier, HostCopy

WIDTH = 64
NBYTES = 4 * WIDTH * WIDTH


class Recorded(HostCopier):
    """Records the copies back to the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.fetched: list[HostCopy] = []

    def fetch(self, copy: HostCopy):
        self.fetched.append(copy)
        return super().fetch(copy)


def copier() -> HostCopier:
    return HostCopier(torch.device("cpu"), slab_bytes=3 * NBYTES)


class Layers(torch.nn.Module):
    """Layers that each save one tensor, their output; ``before`` is called in the backward pass."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((), 0.5))
        self.count = count

    def forward(self, x: Tensor, hook=lambda layer: None) -> Tensor:
        for layer in range(self.count):
            x = (x * self.scale.item()).exp()
            if x.requires_grad:
                x.register_hook(lambda gradient, layer=layer: hook(layer))
        return x


def inputs() -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("ahead", [0, 1, NBYTES, 3 * NBYTES, 100 * NBYTES])
def test_gradients_are_the_same_however_many_bytes_stay(ahead: int) -> None:
    module, plain, moved = Layers(8), inputs(), inputs()
    module(plain).sum().backward()
    with offloaded_activations(module, copier(), ahead):
        out = module(moved)
    out.sum().backward()
    assert torch.equal(plain.grad, moved.grad)


def test_host_memory_is_reused_by_later_passes() -> None:
    module, copies, x = Layers(8), copier(), inputs()
    sizes = []
    for _ in range(4):
        with offloaded_activations(module, copies, ahead=0):
            out = module(x)
        out.sum().backward()
        del out
        sizes.append(copies.nbytes)
    assert sizes[0] >= 8 * NBYTES
    assert set(sizes) == {sizes[0]}


def test_two_passes_in_flight_do_not_share_memory() -> None:
    module, copies = Layers(6), copier()
    xs = [inputs(), (2 * inputs()).detach().requires_grad_()]
    outs = []
    for x in xs:
        with offloaded_activations(module, copies, ahead=0):
            outs.append(module(x))
    for out in outs:
        out.sum().backward()
    for x in xs:
        plain = x.detach().clone().requires_grad_()
        module(plain).sum().backward()
        assert torch.equal(plain.grad, x.grad)


def test_tensors_are_fetched_before_the_backward_pass_needs_them() -> None:
    module, copies, arrived = Layers(8), Recorded(torch.device("cpu")), []
    with offloaded_activations(module, copies, ahead=2 * NBYTES):
        # at the gradient of a layer's output, that layer's backward pass is about to begin
        out = module(inputs(), lambda layer: arrived.append((layer, len(copies.fetched))))
    out.sum().backward()
    # layers 7 and 6 stayed; each layer's pass brings back the two before it
    assert arrived == [(7, 0), (6, 1), (5, 2), (4, 3), (3, 4), (2, 5), (1, 6), (0, 6)]
    assert len(copies.fetched) == len(set(copies.fetched)) == 6


def test_each_tensor_is_freed_after_its_use() -> None:
    module, copies, living = Layers(8), copier(), []
    with offloaded_activations(module, copies, ahead=NBYTES):
        out = module(inputs(), lambda layer: living.append(copies.copies))
    out.sum().backward()
    assert living == [7, 7, 6, 5, 4, 3, 2, 1]
    assert copies.copies == 0


def test_a_saved_tensor_that_is_changed_in_place_is_refused() -> None:
    module, copies, x = Layers(1), copier(), inputs()
    with offloaded_activations(module, copies, ahead=NBYTES):
        out = module(x)
        with torch.no_grad():
            out.add_(1.0)
        with pytest.raises(RuntimeError, match="changed in place"):
            module(out)

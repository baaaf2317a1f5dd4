"""Which tensors an operation reads and writes: an access that is missed hides every race of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from simulated_device import on_simulated_gpu
from torch.nn import functional


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    monkeypatch.delenv("MPPO_DEVICE", raising=False)


def races(use: Any, make: Any) -> list[str]:
    """The races of a program that uses what another stream works on."""

    def program() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            used = make()
        use(used)

    return [race.describe() for race in on_simulated_gpu(program)[0].races]


def new() -> torch.Tensor:
    return torch.zeros(8, device="cuda")


READS = {
    "list": lambda x: torch.cat([new(), x]),
    "tuple": lambda x: torch.stack((new(), x)),
    "list of a foreach operation": lambda x: torch._foreach_add([new()], [x]),
    "second list in place": lambda x: torch._foreach_add_([new()], [x]),
    "norm of a list": lambda x: torch._foreach_norm([x]),
    "keyword": lambda x: torch.baddbmm(
        torch.zeros(1, 2, 2, device="cuda"), batch1=x.view(1, 2, 4),
        batch2=torch.zeros(1, 4, 2, device="cuda"),
    ),
    "fused norm": lambda x: torch.rms_norm(x, (8,), torch.ones(8, device="cuda")),
    "fused norm's weights": lambda x: functional.rms_norm(new(), (8,), x),
    "filled mask": lambda x: new().masked_fill(x > 0, 1.0),
    "values for a mask": lambda x: new().__setitem__(torch.ones(8, device="cuda") > 0, x),
    "number": lambda x: x[0].item(),
    "numbers": lambda x: x.tolist(),
    "comparison": lambda x: torch.equal(new(), x),
    "copy to the host": lambda x: x.cpu().numpy(),
}  # fmt: skip
WRITES = {
    "list in place": lambda x: torch._foreach_add_([x], 1.0),
    "output of a list": lambda x: torch.cat([new()], out=x),
    "filled mask": lambda x: x.masked_fill_(new() > 0, 1.0),
    "assignment to a mask": lambda x: x.__setitem__(torch.ones(8, device="cuda") > 0, 1.0),
}
MASKS = {
    "index": lambda mask: new()[mask],
    "assigned number": lambda mask: new().__setitem__(mask, 1.0),
    "assigned tensor": lambda mask: new().__setitem__(mask, new()),
    "fill": lambda mask: new().masked_fill_(mask, 1.0),
    "selection": lambda mask: torch.masked_select(new(), mask),
    "positions": lambda mask: mask.nonzero(),
    "comparison": lambda mask: torch.equal(mask, new() == 0),
}
ON_HOST = {
    "list": lambda x: torch.cat([x, x]),
    "list of a foreach operation": lambda x: torch._foreach_add([x], 1.0),
    "array's numbers": lambda x: x.numpy().tolist(),
    "array's first number": lambda x: x.numpy()[0],
    "array's items": lambda x: list(x.numpy()),
    "array's bytes": lambda x: x.numpy().tobytes(),
    "sum of an array": lambda x: x.numpy().sum(),
    "view of an array": lambda x: (x.numpy().reshape(2, 4) + 1).tolist(),
    "numbers of an array of another library": lambda x: np.asanyarray(x).tolist(),
    "numbers": lambda x: x.tolist(),
    "comparison": lambda x: torch.equal(x, torch.zeros(8)),
}
WRITES_ON_HOST = {
    "in place": lambda x: x.fill_(1.0),
    "array": lambda x: x.numpy().__setitem__(0, 1.0),
    "array in place": lambda x: np.add(1.0, 1.0, out=x.numpy()),
    "list in place": lambda x: torch._foreach_add_([x], 1.0),
    "output of a list": lambda x: torch.cat([torch.zeros(8)], out=x),
}


@pytest.mark.parametrize("name", READS)
def test_what_another_stream_writes_is_read(name):
    (race,) = races(READS[name], lambda: new().mul_(2.0))
    assert "the compute stream reads at" in race


@pytest.mark.parametrize("name", WRITES)
def test_what_another_stream_reads_is_written(name):
    """The stream's own memory, so that only the accesses race."""

    def read() -> torch.Tensor:
        x = new()
        x.record_stream(torch.cuda.default_stream())
        torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())
        x.sum()
        return x

    (race,) = races(WRITES[name], read)
    assert "the compute stream writes at" in race
    assert "reads at" in race


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_read(name):
    found = races(MASKS[name], lambda: torch.ones(8, device="cuda") > 0)
    assert ["the compute stream reads at" in race for race in found] == [True]


@pytest.mark.parametrize("name", ON_HOST)
def test_the_host_reads_what_a_copy_may_not_have_brought(name):
    (race,) = races(ON_HOST[name], lambda: new().to("cpu", non_blocking=True))
    assert "the host reads at" in race


@pytest.mark.parametrize("name", WRITES_ON_HOST)
def test_the_host_writes_what_a_copy_may_still_read(name):
    copies = []

    def copied() -> torch.Tensor:
        x = torch.zeros(8, pin_memory=True)
        copies.append(x.to("cuda", non_blocking=True))
        return x

    (race,) = races(WRITES_ON_HOST[name], copied)
    assert "the host writes at" in race


def test_an_index_in_pinned_memory_is_read_by_the_gpu():
    def copied() -> torch.Tensor:
        return torch.zeros(8, dtype=torch.int64, device="cuda").to("cpu", non_blocking=True)

    (race,) = races(lambda index: new()[index], copied)
    assert "the compute stream reads at" in race


def test_to_make_an_array_is_no_access():
    """Megatron makes arrays of the splits of tokens before it waits for their copies."""

    def used_later(x: torch.Tensor) -> None:
        array = x.numpy()
        torch.cuda.synchronize()
        assert array.tolist() == [0.0] * 8
        array[0] = 1.0
        assert x[0].item() == 1.0

    assert not races(used_later, lambda: new().to("cpu", non_blocking=True))


def test_an_ordered_access_is_no_race():
    def wait_and_use(x: torch.Tensor) -> None:
        torch.cuda.synchronize()
        for use in (*READS.values(), *WRITES.values()):
            use(x)

    assert not races(wait_and_use, lambda: new().mul_(2.0))

"""Which accesses of the host to a simulated GPU make it wait."""

from __future__ import annotations

import pytest
import torch
from simulated_device import on_simulated_gpu

CASES = {
    "copy of ordinary memory": (lambda x, n: torch.arange(n).to("cuda"), 1),
    "copy of ordinary memory that need not wait": (
        lambda x, n: torch.arange(n).to("cuda", non_blocking=True), 1,
    ),
    "copy of pinned memory": (
        lambda x, n: torch.empty(n, pin_memory=True).to("cuda", non_blocking=True), 0,
    ),
    "copy of pinned memory that waits": (
        lambda x, n: torch.empty(n, pin_memory=True).to("cuda"), 1,
    ),
    "copy into ordinary memory": (lambda x, n: torch.empty(n).copy_(x, non_blocking=True), 1),
    "number": (lambda x, n: x[0].item(), 1),
    "numbers": (lambda x, n: x.tolist(), 1),
    "numbers in rows": (lambda x, n: x.view(2, 4).tolist(), 1),
    "comparison": (lambda x, n: torch.equal(x, torch.zeros(n, device="cuda")), 1),
    "index on the GPU": (lambda x, n: x[torch.arange(n, device="cuda")], 0),
    "index on the host": (lambda x, n: x[torch.arange(n)], 1),
    "fill of a mask": (lambda x, n: x.masked_fill_(x > 0, 1.0), 0),
    "assignment to a mask": (lambda x, n: x.__setitem__(torch.ones(n, device="cuda") > 0, 1.0), 0),
    "selection by a mask": (lambda x, n: x[torch.ones(n, device="cuda") > 0], 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_access_waits_as_often_as_on_a_gpu(name, monkeypatch):
    monkeypatch.delenv("MPPO_DEVICE", raising=False)
    access, waits = CASES[name]
    _, counted = on_simulated_gpu(lambda: access(torch.zeros(8, device="cuda"), 8))
    assert counted == waits

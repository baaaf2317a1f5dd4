"""Which accesses of the host to a simulated GPU make it wait."""

from __future__ import annotations

import pytest
import torch
from mppo_simulate.gpu import cuda_namespace, torch_guard
from mppo_simulate.gpu.counters import Counters
from mppo_simulate.gpu.device_mode import SimulatedGpu
from mppo_simulate.gpu.ledger import Ledger
from mppo_simulate.gpu.recorder import RankRecorder
from mppo_simulate.isolated import isolated

from mppo.config.gpu_types import find_gpu

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
    "index on the GPU": (lambda x, n: x[torch.arange(n, device="cuda")], 0),
    "index on the host": (lambda x, n: x[torch.arange(n)], 1),
    "fill of a mask": (lambda x, n: x.masked_fill_(x > 0, 1.0), 0),
    "assignment to a mask": (lambda x, n: x.__setitem__(torch.ones(n, device="cuda") > 0, 1.0), 0),
    "selection by a mask": (lambda x, n: x[torch.ones(n, device="cuda") > 0], 1),
}  # fmt: skip


def waits_of(name: str) -> int:
    ledger = Ledger(lambda: "phase")
    counters = Counters(lambda: "phase")
    recorder = RankRecorder(lambda: "phase", ledger, False)
    torch_guard.install()
    cuda_namespace.install(ledger, counters, recorder, find_gpu("h100-80gb"), 0, 8)
    with SimulatedGpu(ledger, counters, recorder):
        x = torch.zeros(8, device="cuda")
        counters.clear()
        CASES[name][0](x, 8)
    return sum(counters.waits.values())


@pytest.mark.parametrize("name", CASES)
def test_an_access_waits_as_often_as_on_a_gpu(name, monkeypatch):
    monkeypatch.delenv("MPPO_DEVICE", raising=False)
    assert isolated(waits_of, name) == CASES[name][1]

"""Short programs on a simulated GPU, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable

from mppo_simulate.gpu import cuda_namespace, norm_kernel, torch_guard, world
from mppo_simulate.gpu.counters import Counters
from mppo_simulate.gpu.device_mode import SimulatedGpu
from mppo_simulate.gpu.ledger import Ledger
from mppo_simulate.gpu.recorder import RankRecorder
from mppo_simulate.isolated import isolated
from mppo_simulate.records import RankRecord

from mppo.recipe.gpu_types import find_gpu


def on_simulated_gpu(
    program: Callable[[], None], rank: int = 0, world_size: int = 1
) -> tuple[RankRecord, int]:
    """Run a program on a rank's simulated GPU.

    Returns:
        What the rank did, and how often its host waited for the GPU.
    """
    return isolated(_simulated, program, rank, world_size)


def _simulated(program: Callable[[], None], rank: int, world_size: int) -> tuple[RankRecord, int]:
    ledger, counters = Ledger(lambda: "phase"), Counters(lambda: "phase")
    recorder = RankRecorder(lambda: "phase", ledger, True)
    torch_guard.install()
    cuda_namespace.install(ledger, counters, recorder, find_gpu("h100-80gb"), 0, 8)
    norm_kernel.install(counters, recorder)
    world.install(rank, world_size, counters, recorder)
    with SimulatedGpu(ledger, counters, recorder):
        program()
    return RankRecord(rank, recorder.records, recorder.races), sum(counters.waits.values())

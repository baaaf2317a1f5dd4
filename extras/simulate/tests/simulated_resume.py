"""A checkpoint of Megatron's hybrid CPU optimizer, written and loaded on a simulated GPU.

Tensors on the CPU have values there, and tensors on the GPU have none: they are saved as zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mppo_simulate.case import RankCase
from mppo_simulate.gpu import cuda_namespace, torch_guard, world
from mppo_simulate.gpu.counters import Counters
from mppo_simulate.gpu.device_mode import SimulatedGpu
from mppo_simulate.gpu.ledger import Ledger
from mppo_simulate.gpu.recorder import RankRecorder
from mppo_simulate.rank import _Simulation, current_phase

MOMENTS = ("exp_avg", "exp_avg_sq")


def saved_and_loaded(case: RankCase, folder: Path) -> dict[str, Any]:
    """Train a step, save, build the roles again, load, and train a step.

    Returns:
        By role: the optimizer's state (``described``) and counters when it was saved, in the new
        roles, and after loading; the sum of the CPU's copies of weights before loading and after.
    """
    from mppo.checkpoint.role_state import load_role, role_counters

    assert case.world_size == 1, "a checkpoint has the tensors of all ranks"
    ledger, counters = Ledger(current_phase), Counters(current_phase)
    torch_guard.install()
    recorder = RankRecorder(current_phase, ledger, on=False)
    cuda_namespace.install(ledger, counters, recorder, case.gpu, 0, 1)
    world.install(0, 1, counters, recorder)
    found: dict[str, dict[str, Any]] = {}
    with SimulatedGpu(ledger, counters, recorder):
        run = _Simulation(case, ledger, counters, recorder)
        run.build()
        run.step(1)
        for name, role in run.roles.trained.items():
            moments = [state[kind] for state in _states_on_cpu(role) for kind in MOMENTS]
            for number, moment in enumerate(moments):
                moment.copy_(_numbers(moment, number))
            found[name] = {"saved": described(role), "counters": role_counters(role)}
        _save(run.roles.trained, folder)
        run.build()
        for name, role in run.roles.trained.items():
            one = found[name]
            one |= {"built": described(role), "counters built": role_counters(role)}
            for copy in _copies_on_cpu(role):
                copy.fill_(1.0)
            one["copies before"] = sum(float(copy.sum()) for copy in _copies_on_cpu(role))
            load_role(role, folder / name, one["counters"])
            one |= {"loaded": described(role), "counters loaded": role_counters(role)}
            one["copies"] = sum(float(copy.sum()) for copy in _copies_on_cpu(role))
        run.step(2)
        for name, role in run.roles.trained.items():
            found[name]["counters at the end"] = role_counters(role)
    return found


def described(role: Any) -> list[dict[str, Any]]:
    """Devices and shapes of every main weight and its moments; sums of moments on the CPU."""
    rows = []
    for hybrid in _hybrids(role):
        for group in hybrid.param_groups:
            for main in group["params"]:
                row = {"main": [main.device.type, *main.shape]}
                for kind in MOMENTS:
                    moment = hybrid.state[main][kind]
                    row[kind] = [moment.device.type, *moment.shape]
                    if moment.device.type == "cpu":
                        row[kind].append(moment.double().sum().item())
                rows.append(row)
    return rows


def _hybrids(role: Any) -> list[Any]:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    found = [part.optimizer for part in role.optimizer.parts]
    assert all(isinstance(one, HybridDeviceOptimizer) for one in found)
    return found


def _states_on_cpu(role: Any) -> Iterator[dict[str, torch.Tensor]]:
    for hybrid in _hybrids(role):
        for inner in hybrid.cpu_optimizers:
            yield from inner.state.values()


def _copies_on_cpu(role: Any) -> list[torch.Tensor]:
    """The CPU's copies of main weights."""
    found = (hybrid.gpu_params_map_cpu_copy.values() for hybrid in _hybrids(role))
    return [copy.data for copies in found for copy in copies]


def _numbers(like: torch.Tensor, number: int) -> torch.Tensor:
    """Random numbers, other ones for every tensor."""
    random = torch.Generator().manual_seed(number)
    return torch.rand(like.shape, generator=random)


def _save(roles: dict[str, Any], folder: Path) -> None:
    """Write the roles as a checkpoint does."""
    from mppo.checkpoint.folder import Manifest
    from mppo.checkpoint.role_state import sharded_state
    from mppo.checkpoint.writer import NOTES, SaveJob, plan_shards

    shards, building = {}, folder.with_name("building")
    (building / NOTES).mkdir(parents=True)
    for name, role in roles.items():
        (building / name).mkdir()
        with role.groups.active():
            shards[name] = plan_shards(sharded_state(role), building / name, None)
    manifest = Manifest(0, 1, {}, {}, {}, "0")
    job = SaveJob(building, folder, 0, 1, shards, {}, manifest, lambda: None, patience_s=600.0)
    job.run()
    if job.error is not None:
        raise job.error

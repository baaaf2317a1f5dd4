"""Ranks that share a GPU: every operation gives gloo's results, staged, and so do whole layouts.

There is no GPU here, so the group of these tests stages tensors of the CPU.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layout_case import Case, compare, run_case
from ranks import start_ranks
from torch.distributed import distributed_c10d

from mppo.parallel.collectives import wait_for_ranks
from mppo.parallel.staged_group import StagedGroup, register

WORLD = 4
CASES = [
    Case("qwen2", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    Case("qwen3_moe", {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    Case("qwen2", {"context_parallel_size": 2, "pipeline_model_parallel_size": 2}),
]


class StagesAll(StagedGroup):
    """Stages every tensor."""

    staged = 0

    @staticmethod
    def stages(tensor: torch.Tensor) -> bool:
        StagesAll.staged += 1
        return True


def operations(rank: int) -> dict[str, list[torch.Tensor]]:
    """Results of every operation that Megatron and mppo use, with tensors of rank and position."""
    own = torch.arange(8.0) + 10 * rank
    found: dict[str, list[torch.Tensor]] = {}

    def record(name: str, *tensors: torch.Tensor) -> None:
        found[name] = [tensor.clone() for tensor in tensors]

    total = own.clone()
    dist.all_reduce(total)
    record("all_reduce", total)
    largest = own.clone().to(torch.bfloat16)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    record("max", largest)
    everywhere = own.clone()
    dist.broadcast(everywhere, 2)
    record("broadcast", everywhere)
    gathered = torch.empty(8 * WORLD)
    dist.all_gather_into_tensor(gathered, own)
    record("all_gather_into_tensor", gathered)
    listed = [torch.empty(8) for _ in range(WORLD)]
    dist.all_gather(listed, own)
    record("all_gather", *listed)
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, own)
    record("reduce_scatter_tensor", part)
    turned = torch.empty(8)
    dist.all_to_all_single(turned, own)
    record("all_to_all_single", turned)
    sizes = [rank + 1] * WORLD
    uneven = torch.empty(sum(range(1, WORLD + 1)))
    dist.all_to_all_single(
        uneven, torch.full((sum(sizes),), float(rank)), list(range(1, WORLD + 1)), sizes
    )
    record("uneven all_to_all_single", uneven)
    dist.reduce(summed := own.clone(), 1)
    if rank == 1:
        record("reduce", summed)
    arrived = torch.empty(8)
    after, before = (rank + 1) % WORLD, (rank - 1) % WORLD
    pair = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, arrived, before)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    record("batch_isend_irecv", arrived)
    sent, late = own.clone(), torch.zeros(8)
    receiving = dist.irecv(late, before, tag=3)
    sending = dist.isend(sent, after, tag=3)
    sent.fill_(-1)  # the message is what it was when the send started
    sending.wait()
    receiving.wait()
    record("isend", late)
    outputs, inputs = [torch.empty(2), torch.empty(2)], [own, 2 * own]
    with distributed_c10d._coalescing_manager(async_ops=True) as coalesced:
        for output, whole in zip(outputs, inputs):
            dist.reduce_scatter_tensor(output, whole, async_op=True)
    coalesced.wait()
    record("coalesced reduce_scatter_tensor", *outputs)
    wholes = [torch.empty(8 * WORLD), torch.empty(8 * WORLD)]
    with distributed_c10d._coalescing_manager(async_ops=True) as coalesced:
        for whole, mine in zip(wholes, inputs):
            dist.all_gather_into_tensor(whole, mine, async_op=True)
    coalesced.wait()
    record("coalesced all_gather_into_tensor", *wholes)
    objects = [None] * WORLD
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(WORLD)]
    dist.barrier()
    wait_for_ranks(WORLD)
    return found


def _worker(rank: int, folder: Path, backend: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from mppo.parallel import device

    device.prepare_megatron()
    from mppo.parallel.groups import GroupRegistry

    register("stages_all", StagesAll)
    dist.init_process_group(backend, f"file://{folder}/{backend}", rank=rank, world_size=WORLD)
    found = operations(rank) if backend != "gloo" else {}
    registry = GroupRegistry()
    outcomes = [run_case(case, folder, registry) for case in CASES]
    torch.save((found, outcomes, StagesAll.staged), folder / f"{backend}{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    from tiny_models import save

    folder = tmp_path_factory.mktemp("staged")
    for model in {case.model for case in CASES}:
        save(model, folder / model)
    for backend in ("gloo", "stages_all"):
        start_ranks(_worker, (folder, backend), WORLD)
    return folder


def loaded(folder: Path, backend: str, rank: int):
    return torch.load(folder / f"{backend}{rank}.pt", weights_only=False)


@pytest.mark.distributed
def test_every_operation_has_its_result(found):
    ranks = [loaded(found, "stages_all", rank)[0] for rank in range(WORLD)]
    own = [torch.arange(8.0) + 10 * rank for rank in range(WORLD)]
    total = sum(own)
    for rank, here in enumerate(ranks):
        wanted = {
            "all_reduce": [total],
            "max": [own[-1].to(torch.bfloat16)],
            "broadcast": [own[2]],
            "all_gather_into_tensor": [torch.cat(own)],
            "all_gather": own,
            "reduce_scatter_tensor": [total[2 * rank : 2 * rank + 2]],
            "all_to_all_single": [torch.cat([x[2 * rank : 2 * rank + 2] for x in own])],
            "uneven all_to_all_single": [
                torch.cat([torch.full((r + 1,), float(r)) for r in range(WORLD)])
            ],
            "batch_isend_irecv": [own[rank - 1]],
            "isend": [own[rank - 1]],
            "coalesced reduce_scatter_tensor": [
                factor * total[2 * rank : 2 * rank + 2] for factor in (1, 2)
            ],
            "coalesced all_gather_into_tensor": [factor * torch.cat(own) for factor in (1, 2)],
        } | ({"reduce": [total]} if rank == 1 else {})
        assert here.keys() == wanted.keys()
        for name, tensors in wanted.items():
            assert len(here[name]) == len(tensors), name
            for one, other in zip(here[name], tensors):
                assert torch.equal(one, other), (rank, name)


@pytest.mark.distributed
def test_layouts_have_the_same_numbers(found):
    for rank in range(WORLD):
        _, outcomes, staged = loaded(found, "stages_all", rank)
        assert staged > 100
        if rank == 0:
            for here, there in zip(outcomes, loaded(found, "gloo", 0)[1], strict=True):
                compare(here, there)

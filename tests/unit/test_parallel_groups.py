"""Which process groups share a communicator."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture(scope="module")
def fresh() -> Iterator[ProcessPoolExecutor]:
    """A process in which nothing has changed Megatron."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        yield process


Wanted = tuple[list[int], str, str | None]


def _created(fresh: ProcessPoolExecutor, *wanted: Wanted) -> list[int]:
    """For each group (ranks, description, backend) the index of the first one that it shares."""
    return fresh.submit(_create, wanted).result()


def _create(wanted: tuple[Wanted, ...]) -> list[int]:
    from megatron.core import parallel_state

    from mppo.parallel import shared_groups

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    shared_groups.install("fake")
    shared_groups.install("fake")  # no effect
    groups: list[Any] = [
        parallel_state.create_group(ranks, backend=backend, group_desc=name)
        for ranks, name, backend in wanted
    ]
    dist.destroy_process_group()
    return [next(i for i, other in enumerate(groups) if other is group) for group in groups]


def test_groups_of_the_same_ranks_are_one(fresh):
    data, experts = "DATA_PARALLEL_GROUP", "EXPERT_MODEL_PARALLEL_GROUP"
    assert _created(
        fresh, ([0, 1], data, None), ([0, 1], experts, None), ([0, 2], data, None),
        ([1, 0], experts, None), ([0, 1], data, "fake"),
    ) == [0, 0, 2, 0, 0]  # fmt: skip


def test_groups_across_stages_stay_apart(fresh):
    """Sums of tied embeddings and norms begin in different orders on different stages."""
    assert _created(
        fresh, ([0, 4], "PIPELINE_MODEL_PARALLEL_GROUP", None), ([0, 4], "EMBEDDING_GROUP", None),
        ([0, 4], "MODEL_PARALLEL_GROUP", None), ([0, 4], "DATA_PARALLEL_GROUP", None),
        ([0, 4], "PIPELINE_MODEL_PARALLEL_GROUP", None),
    ) == [0, 1, 2, 3, 0]  # fmt: skip

"""What a simulated rank records of its communications."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from mppo_simulate.isolated import SimulationError, _started, isolated, isolated_each
from mppo_simulate.together.matching import match
from simulated_device import on_simulated_gpu


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    monkeypatch.delenv("MPPO_DEVICE", raising=False)


def new() -> torch.Tensor:
    return torch.zeros(8, device="cuda")


def reduce(root: int) -> None:
    dist.reduce(new(), root)


def broadcast(root: int) -> None:
    dist.broadcast(new(), root)


def gather(root: int) -> None:
    dist.gather(new(), [new(), new()] if dist.get_rank() == root else None, root)


def scatter(root: int) -> None:
    dist.scatter(new(), [new(), new()] if dist.get_rank() == root else None, root)


def broadcast_objects(root: int) -> None:
    dist.broadcast_object_list([1], src=root)


ROOTED = {
    "reduce": reduce,
    "broadcast": broadcast,
    "gather": gather,
    "scatter": scatter,
    "broadcast of objects": broadcast_objects,
}


@pytest.mark.parametrize("name", ROOTED)
def test_ranks_must_agree_on_the_root(name):
    def mismatches(*roots: int) -> list[str]:
        ranks = [
            on_simulated_gpu(partial(ROOTED[name], root), rank, 2)[0]
            for rank, root in enumerate(roots)
        ]
        return [one.describe() for one in match(ranks)]

    assert not mismatches(1, 1)
    (found,) = mismatches(0, 1)
    word = "to" if name in ("reduce", "gather") else "from"
    assert f"('{word}', 0)" in found
    assert f"('{word}', 1)" in found


@pytest.mark.parametrize(
    ("start", "root", "does"),
    [
        (dist.broadcast, 0, "reads"), (dist.broadcast, 1, "writes"),
        (dist.reduce, 0, "writes"), (dist.reduce, 1, "reads"),
    ],
)  # fmt: skip
def test_only_what_receives_writes(start, root, does):
    """Another stream's later write races with what the communication does on rank 0."""

    def program() -> None:
        x = new()
        start(x, root, async_op=True)
        x.fill_(1.0)

    (race,) = on_simulated_gpu(program, 0, 2)[0].races
    assert race.first.does == does


def waited_by(*streams: int) -> Callable[[], None]:
    """A sum that these of two streams wait for, and that both use."""

    def program() -> None:
        x = new()
        both = [torch.cuda.Stream(), torch.cuda.Stream()]
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        for number in streams:
            with torch.cuda.stream(both[number]):
                work.wait()
        for stream in both:
            with torch.cuda.stream(stream):
                x.sum()

    return program


def test_every_stream_that_uses_a_sum_must_wait_for_it():
    record, _ = on_simulated_gpu(waited_by(0, 1), world_size=2)
    assert not record.races
    waits = [one.stream for one in record.records if one.kind == "stream_wait"]
    assert [name.split(" (")[0] for name in waits] == ["stream 1", "stream 2"]
    races = on_simulated_gpu(waited_by(0, 0), world_size=2)[0].races
    (late,) = [race for race in races if race.first.actor.startswith("NCCL")]
    assert late.second.actor.startswith("stream 2")


@pytest.mark.parametrize(
    ("value", "reduction", "wanted"),
    [
        (True, dist.ReduceOp.SUM, [True]),
        (True, dist.ReduceOp.MIN, [True]),
        (3, dist.ReduceOp.SUM, [6]),
        (3, dist.ReduceOp.MAX, [3]),
        (3.0, dist.ReduceOp.AVG, [3.0]),
    ],
)
def test_a_reduction_of_equal_known_values_is_known(value, reduction, wanted):
    def program() -> None:
        x = torch.tensor([value]).to("cuda")
        dist.all_reduce(x, op=reduction)
        assert x.tolist() == wanted

    on_simulated_gpu(program, world_size=2)


class NotReadBack(Exception):
    """It can be pickled, but not read back."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def test_a_result_that_does_not_pass_between_processes_is_an_error_of_its_rank():
    with pytest.raises(SimulationError, match=r"the result cannot be pickled, .*lambda"):
        isolated(lambda: {"shape": lambda: 1})
    with pytest.raises(SimulationError, match=r"the result cannot be unpickled, .*two"):
        isolated(lambda: NotReadBack("a", "b"))


def test_the_ranks_before_a_failed_one_are_yielded():
    ranks = isolated_each(lambda rank: rank if rank < 2 else (lambda: rank), range(4), 2)
    assert [next(ranks), next(ranks)] == [0, 1]
    with pytest.raises(SimulationError, match="cannot be pickled"):
        next(ranks)


def test_a_rank_whose_caller_is_gone_ends():
    """With a result that is larger than a pipe's buffer."""
    process, receiver = _started(lambda: bytes(1 << 20), ())
    receiver.close()
    process.join()
    assert process.exitcode == 0


def test_a_rank_that_is_killed_is_an_error():
    with pytest.raises(SimulationError, match="ended with code 7"):
        isolated(lambda: os._exit(7))

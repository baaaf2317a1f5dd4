"""The executor: when it allocates the buffers of receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mppo.pipeline.actions import Action, RoleWork
from mppo.pipeline.executor import carry_out
from mppo.pipeline.links import Arriving
from mppo.pipeline.schedule import forward_list, make_schedule
from mppo.pipeline.streams import KINDS

NAMES = {"critic": "updating critic", "actor": "updating actor"}


class Diary:
    """Work and links of a stage that write down what the executor does.

    Attributes:
        entries: "pass", "step", "allocate", or the kind of a message, in order.
    """

    def __init__(self) -> None:
        self.entries: list[str] = []
        self._buffers: list[torch.Tensor] = []

    def receive_buffer(self, mini_batch: int, micro_batch: int) -> torch.Tensor:
        self.entries.append("allocate")
        self._buffers.append(torch.tensor([mini_batch, micro_batch]))
        return self._buffers[-1]

    def forward(self, mini_batch: int, micro_batch: int, chunk: int, received: Any) -> Any:
        if received is not None:
            assert received.tolist() == [mini_batch, micro_batch], "the buffer of another message"
        self.entries.append("pass")
        return torch.empty(0)

    backward = forward

    def __getattr__(self, name: str) -> Any:
        """Messages, reductions, norms."""
        receives = name.startswith("receive")

        def call(tensor: Any = None) -> Arriving | None:
            self.entries.append(name)
            return Arriving(tensor, Done()) if receives else None  # pyright: ignore

        return call


class Done:
    def wait(self) -> None: ...


def entries_of(actions: Sequence[Action]) -> list[str]:
    diary: Any = Diary()

    def step(role: str, mini_batch: int) -> bool:
        diary.entries.append("step")
        return True

    assert carry_out(actions, dict.fromkeys(NAMES, diary), diary, NAMES, step, lambda at: [])
    return diary.entries


def check(entries: Sequence[str]) -> None:
    """Assert that nothing is issued between a pass or step and the allocations that follow it."""
    issued: list[str] = []
    for entry in entries:
        if entry in ("pass", "step"):
            issued = []
        elif entry == "allocate":
            assert not issued
        else:
            issued.append(entry)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_buffers_are_allocated_before_the_send_of_the_pass_before(kind, stages, chunks):
    """An allocation may wait for the device, as a pass does in ``deadlock``'s rules: directly after
    a pass or step, or at the beginning, it waits for nothing else than those do."""
    roles = tuple(RoleWork(name, (stages, 2 * stages), chunks=chunks) for name in NAMES)
    lists = make_schedule(kind, roles, stages).lists
    if chunks == 1:
        lists = [*lists, *(forward_list(roles, stage, stages) for stage in range(stages))]
    everywhere = [entries_of(actions) for actions in lists]
    for entries in everywhere:
        check(entries)
        received = [entry for entry in entries if entry.startswith("receive")]
        assert entries.count("allocate") == len(received)
    assert any("allocate" in entries for entries in everywhere)

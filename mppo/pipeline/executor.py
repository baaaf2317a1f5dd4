"""Carries out a stage's list of actions; nothing else decides what runs when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol, cast

from torch import Tensor

from mppo.pipeline.actions import Action
from mppo.pipeline.links import Arriving, Links
from mppo.pipeline.schedule import Schedule
from mppo.pipeline.timeline import Recorder

Numbers = tuple[str, int, int]
"""Role, mini-batch, micro-batch."""


class ForwardWork(Protocol):
    """What a role does on this stage in a list of forward passes."""

    def room(self, mini_batch: int, micro_batch: int) -> Tensor:
        """Memory for a message of a micro-batch, in either direction."""
        ...

    def forward(self, mini_batch: int, micro_batch: int, received: Tensor | None) -> Tensor | None:
        """Compute a forward pass; what the next stage is sent, None on the last stage."""
        ...


class StageWork(ForwardWork, Protocol):
    """What a role does on this stage in an update."""

    def backward(self, mini_batch: int, micro_batch: int, received: Tensor | None) -> Tensor | None:
        """Compute a backward pass; what the stage before is sent, None on the first stage."""
        ...

    def reduce(self, mini_batch: int) -> None:
        """Begin to reduce the accumulated gradient over data parallelism."""
        ...

    def norm(self, mini_batch: int) -> None:
        """Complete the gradient, and begin to sum its norm over all stages."""
        ...


def run_forward(actions: Sequence[Action], work: Mapping[str, ForwardWork], links: Links) -> None:
    """Carry out a stage's list of forward passes, of any number of roles."""
    run = _Run(cast("Mapping[str, StageWork]", work), links)
    for action in actions:
        run.act(action)
    links.finish()


def run_update(
    schedule: Schedule,
    work: Mapping[str, StageWork],
    links: Links,
    step: Callable[[str, int], bool],
    recorder: Recorder | None = None,
) -> bool:
    """Carry out this stage's list of an update.

    Args:
        schedule: a schedule that ``mppo.pipeline.checks.check_schedule`` accepts.
        work: of each role, by name.
        links: to the neighbouring stages.
        step: takes an optimizer step, given its role and mini-batch; whether the update goes on,
            the same on every rank.
        recorder: notes when the actions ran; None: nothing is noted.

    Returns:
        Whether it came to its end: False where ``step`` said that the update is to be left.
    """

    actions, run, goes_on = schedule.lists[links.stage], _Run(work, links, recorder), True
    for position, action in enumerate(actions):
        with nullcontext() if recorder is None else recorder.action(action):
            if action.kind == "step":
                goes_on = step(action.role, action.mini_batch)
            else:
                run.act(action)
        if not goes_on:
            for last in schedule.rest_after(links.stage, position):
                run.act(last)
            break
    links.finish()
    return goes_on


class _Run:
    """What is on its way while a list is carried out."""

    def __init__(
        self, work: Mapping[str, StageWork], links: Links, recorder: Recorder | None = None
    ) -> None:
        self._work, self._links, self._recorder = work, links, recorder
        self._inputs: dict[Numbers, Arriving] = {}
        self._gradients: dict[Numbers, Arriving] = {}
        self._outgoing: dict[Numbers, Tensor] = {}

    def act(self, action: Action) -> None:
        """Carry out an action, other than a step."""
        work, i, j = self._work[action.role], action.mini_batch, action.micro_batch
        numbers = action.role, i, j
        match action.kind:
            case "receive_input":
                self._inputs[numbers] = self._links.receive_input(work.room(i, j))
            case "receive_gradient":
                self._gradients[numbers] = self._links.receive_gradient(work.room(i, j))
            case "forward":
                received = self._await(self._inputs, numbers) if self._links.stage else None
                self._leave(numbers, work.forward(i, j, received))
            case "backward":
                last = self._links.stage == self._links.stages - 1
                received = None if last else self._await(self._gradients, numbers)
                self._leave(numbers, work.backward(i, j, received))
            case "send_output":
                self._links.send_output(self._outgoing.pop(numbers))
            case "send_gradient":
                self._links.send_gradient(self._outgoing.pop(numbers))
            case "reduce":
                work.reduce(i)
            case "norm":
                work.norm(i)

    def _await(self, arriving: dict[Numbers, Arriving], numbers: Numbers) -> Tensor:
        with nullcontext() if self._recorder is None else self._recorder.waiting():
            return arriving.pop(numbers).wait()

    def _leave(self, numbers: Numbers, message: Tensor | None) -> None:
        if message is not None:
            self._outgoing[numbers] = message

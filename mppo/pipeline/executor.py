"""Carries out a stage's list of actions; nothing else decides what runs when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol, cast

from torch import Tensor

from mppo.pipeline.actions import Action
from mppo.pipeline.links import Arriving, Links
from mppo.pipeline.timeline import Recorder
from mppo.supervision.phase import phase

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


def carry_out(
    actions: Sequence[Action],
    work: Mapping[str, ForwardWork],
    links: Links,
    doing: Mapping[str, str],
    step: Callable[[str, int], bool] | None = None,
    rest_after: Callable[[int], Sequence[Action]] | None = None,
    recorder: Recorder | None = None,
) -> bool:
    """Carry out this stage's list.

    Args:
        actions: the list, of a schedule that ``mppo.pipeline.checks.check_schedule`` accepts, or
            of forward passes.
        work: of each role, by name; ``StageWork`` in a list of an update.
        links: to the neighbouring stages.
        doing: the phase that a failure reports, by role.
        step: takes an optimizer step, given its role and mini-batch; whether the update goes on,
            the same on every rank.
        rest_after: what is still done when the update is left at a position of the list.
        recorder: notes when the actions ran; None: nothing is noted.

    Returns:
        Whether the list came to its end: False where ``step`` said that the update is to be left.
    """
    inputs: dict[Numbers, Arriving] = {}
    gradients: dict[Numbers, Arriving] = {}
    outgoing: dict[Numbers, Tensor | None] = {}
    last = links.stage == links.stages - 1
    todo, position, finished = actions, 0, True
    while position < len(todo):
        action = todo[position]
        role = cast("StageWork", work[action.role])
        i, j = action.mini_batch, action.micro_batch
        numbers = action.role, i, j
        position += 1
        noted = nullcontext() if recorder is None else recorder.action(action)
        with phase(doing[action.role]), noted:
            match action.kind:
                case "receive_input":
                    inputs[numbers] = links.receive_input(role.room(i, j))
                case "receive_gradient":
                    gradients[numbers] = links.receive_gradient(role.room(i, j))
                case "forward":
                    received = _wait(inputs.pop(numbers), recorder) if links.stage else None
                    outgoing[numbers] = role.forward(i, j, received)
                case "backward":
                    received = None if last else _wait(gradients.pop(numbers), recorder)
                    outgoing[numbers] = role.backward(i, j, received)
                case "send_output":
                    links.send_output(_message(outgoing.pop(numbers)))
                case "send_gradient":
                    links.send_gradient(_message(outgoing.pop(numbers)))
                case "reduce":
                    role.reduce(i)
                case "norm":
                    role.norm(i)
                case "step":
                    assert step is not None
                    assert rest_after is not None
                    if not step(action.role, i):
                        todo, position, finished = rest_after(position - 1), 0, False
    links.finish()
    return finished


def _wait(arriving: Arriving, recorder: Recorder | None) -> Tensor:
    with nullcontext() if recorder is None else recorder.waiting():
        return arriving.wait()


def _message(computed: Tensor | None) -> Tensor:
    assert computed is not None, "this stage has no neighbour in that direction"
    return computed

"""The executor: runs a stage's list of actions in the order of the list."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from typing import Protocol, cast

from torch import Tensor

from mppo.pipeline.actions import Action, Numbers
from mppo.pipeline.links import Arriving, Links
from mppo.pipeline.timeline import Recorder
from mppo.supervision.phase import phase

_ALLOCATE_AFTER = ("forward", "backward", "step")
"""Kinds of actions after which the buffers of the receives up to the next one are allocated."""


class ForwardWork(Protocol):
    """The operations of one role on this stage in a list of forward passes."""

    def receive_buffer(self, mini_batch: int, micro_batch: int) -> Tensor:
        """Return an empty tensor that can receive a micro-batch's message, in either direction."""
        ...

    def forward(
        self, mini_batch: int, micro_batch: int, chunk: int, received: Tensor | None
    ) -> Tensor | None:
        """Compute a chunk's forward pass from the message (None for the model's first chunk), and
        return the message to the next stage (None for its last chunk)."""
        ...


class StageWork(ForwardWork, Protocol):
    """The operations of one role on this stage in an update."""

    def backward(
        self, mini_batch: int, micro_batch: int, chunk: int, received: Tensor | None
    ) -> Tensor | None:
        """Compute a chunk's backward pass from the message (None for the model's last chunk), and
        return the message to the previous stage (None for its first chunk)."""
        ...

    def reduce(self, mini_batch: int) -> None:
        """Start the data-parallel reduction of the accumulated gradient."""
        ...

    def norm(self, mini_batch: int) -> None:
        """Complete the gradient and start the all-reduce of its norm."""
        ...


def carry_out(
    actions: Sequence[Action],
    work: Mapping[str, ForwardWork],
    links: Links,
    phase_names: Mapping[str, str] | None = None,
    step: Callable[[str, int], bool] | None = None,
    rest_after: Callable[[int], Sequence[Action]] | None = None,
    recorder: Recorder | None = None,
) -> bool:
    """Execute this stage's list; return False if ``step`` ended the update early.

    Args:
        work: the operations of each role, by name; the list of an update needs ``StageWork``.
        phase_names: name of the phase (``mppo.supervision.phase``) of each role's actions; None:
            the caller's phase.
        step: takes the optimizer step of a mini-batch, given the role's name and the mini-batch's
            index. Returns whether the update continues; the same on every rank.
        rest_after: maps the position of the "step" at which the update ends early to the actions
            that this stage must still execute.
    """
    inputs: dict[Numbers, Arriving] = {}
    gradients: dict[Numbers, Arriving] = {}
    outgoing: dict[Numbers, Tensor | None] = {}
    buffers: deque[Tensor] = deque()
    remaining, position, finished = actions, 0, True
    while position < len(remaining):
        if position == 0 or remaining[position - 1].kind in _ALLOCATE_AFTER:
            buffers += _allocate(remaining[position:], work, phase_names)
        action = remaining[position]
        role = cast("StageWork", work[action.role])
        numbers = action.numbers
        _, i, j, chunk = numbers
        position += 1
        recording = nullcontext() if recorder is None else recorder.action(action)
        with _phase_of(action, phase_names), recording:
            match action.kind:
                case "receive_input":
                    inputs[numbers] = links.receive_input(buffers.popleft())
                case "receive_gradient":
                    gradients[numbers] = links.receive_gradient(buffers.popleft())
                case "forward":
                    received = _wait(inputs.pop(numbers, None), recorder)
                    outgoing[numbers] = role.forward(i, j, chunk, received)
                case "backward":
                    received = _wait(gradients.pop(numbers, None), recorder)
                    outgoing[numbers] = role.backward(i, j, chunk, received)
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
                        remaining, position, finished = rest_after(position - 1), 0, False
    links.finish()
    return finished


def _allocate(
    actions: Sequence[Action],
    work: Mapping[str, ForwardWork],
    phase_names: Mapping[str, str] | None,
) -> list[Tensor]:
    """Allocate the buffers of the receives up to the next pass or step. Call it when a pass or step
    has ended, ahead of its send: an allocation may wait for the whole device. With a send under way
    it would wait for a neighbour, which may itself be waiting for this stage's receive."""
    buffers: list[Tensor] = []
    for action in takewhile(lambda each: each.kind not in _ALLOCATE_AFTER, actions):
        if action.kind in ("receive_input", "receive_gradient"):
            with _phase_of(action, phase_names):
                _, i, j, _ = action.numbers
                buffers.append(work[action.role].receive_buffer(i, j))
    return buffers


def _phase_of(
    action: Action, phase_names: Mapping[str, str] | None
) -> AbstractContextManager[None]:
    return nullcontext() if phase_names is None else phase(phase_names[action.role])


def _wait(arriving: Arriving | None, recorder: Recorder | None) -> Tensor | None:
    if arriving is None:
        return None
    with nullcontext() if recorder is None else recorder.waiting():
        return arriving.wait()


def _message(computed: Tensor | None) -> Tensor:
    assert computed is not None, "this stage has no neighbour in that direction"
    return computed

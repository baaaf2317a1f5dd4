"""Which process group and which neighbour a stage uses for each kind of message."""

from __future__ import annotations

from typing import Literal, NamedTuple

from mppo.pipeline.actions import RoleWork

MessageGroup = Literal["pp", "pp_back", "pp_wrap", "pp_wrap_back"]
"""Name of an attribute of ``LayoutGroups``."""


MessageKind = Literal["receive_input", "receive_gradient", "send_output", "send_gradient"]


class Route(NamedTuple):
    """The way of a message: its direction's process group, and the stage at the other end. Messages
    around the pipeline's end have groups of their own: of two stages, the same two ranks."""

    group: MessageGroup
    peer: int


def route(kind: MessageKind, stage: int, stages: int) -> Route:
    down = kind in ("receive_input", "send_output")
    to_next = kind in ("receive_gradient", "send_output")
    wraps = stage == (stages - 1 if to_next else 0)
    groups: tuple[MessageGroup, ...] = ("pp", "pp_wrap") if down else ("pp_back", "pp_wrap_back")
    return Route(groups[wraps], (stage + (1 if to_next else -1)) % stages)


def routes(stage: int, stages: int, chunks: int) -> set[Route]:
    """The ways of all messages of a stage. Each has a communicator of its own."""
    kinds: set[MessageKind] = set()
    if stage > 0 or chunks > 1:
        kinds |= {"receive_input", "send_gradient"}
    if stage < stages - 1 or chunks > 1:
        kinds |= {"send_output", "receive_gradient"}
    return {route(kind, stage, stages) for kind in kinds}


def kept_sends(stage: int, stages: int, chunks: int) -> tuple[int, int]:
    """How many of its last outputs and gradients a stage keeps while their sends are under way.

    The stage waits for the sends before these. These waits do not block, for the following reason.
    When a stage has computed ``b`` backward passes, the next stage has received at least its first
    ``b`` outputs, because the order of the backward passes is never ahead of that of the forward
    passes. The stage has then computed at most ``b + most_in_flight`` forward passes. The same
    holds on the previous stage, which has therefore consumed all but the last ``most_in_flight``
    gradients. The last stage consumes a gradient from the first stage when it computes the
    backward passes of the previous chunk, as many passes later as there are stages.
    """
    work = RoleWork("", (), chunks=chunks)
    gradients = work.most_in_flight(stage - 1, stages) if stage else stages
    return work.most_in_flight(stage, stages), gradients

"""What the stages of a pipeline issue when they execute their lists, as ``deadlock`` reads it.

``executor``, ``links`` and the roles' operations do the same. Passes, reductions and weights of a
stage involve ranks of that stage only, which all execute the same list; each is one operation here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

from mppo.parallel.environment import QUEUES, QUEUES_INTERLEAVED
from mppo.pipeline.actions import Action, Numbers, RoleWork, StageLists, is_interleaved
from mppo.pipeline.deadlock import RankEvent, Rules, find_hang
from mppo.pipeline.routes import MessageKind, kept_sends, route


def hang_of(
    lists: StageLists,
    roles: Sequence[RoleWork],
    host_waits: Literal["stream", "device"] = "stream",
) -> str | None:
    """Describe how the stages wait for each other for ever, or exchange the wrong messages, or
    None. Sends need their receivers, and all stages wait in "norm" as with tied embeddings. In
    every pass the host waits for the stream on which it computes, as with experts, whose token
    counts it reads; or for the whole device."""
    queues = QUEUES_INTERLEAVED if is_interleaved(roles) else QUEUES
    return find_hang(events_of(lists, roles), Rules(queues=queues, host_waits=host_waits))


def events_of(lists: StageLists, roles: Sequence[RoleWork]) -> list[list[RankEvent]]:
    """The events of each stage while it executes its list, of an update or of forward passes."""
    chunks = max((role.chunks for role in roles), default=1)
    return [
        _Stage(stage, len(lists), chunks).events(actions) for stage, actions in enumerate(lists)
    ]


class _Stage:
    def __init__(self, stage: int, stages: int, chunks: int) -> None:
        self._stage, self._stages = stage, stages
        self._events: list[RankEvent] = []
        self._received: dict[tuple[str, Numbers], int] = {}
        self._sent: dict[str, deque[int]] = {"send_output": deque(), "send_gradient": deque()}
        self._kept = dict(zip(self._sent, kept_sends(stage, stages, chunks), strict=True))
        self._reductions: dict[str, int] = {}
        self._norms: dict[str, tuple[int, int]] = {}

    def events(self, actions: Sequence[Action]) -> list[RankEvent]:
        for action in actions:
            match action.kind:
                case "receive_input" | "receive_gradient":
                    self._receive(action, action.kind)
                case "forward" | "backward":
                    self._pass(action)
                case "send_output" | "send_gradient":
                    self._send(action, action.kind)
                case "reduce":
                    group, alone = ("reduce", self._stage), (self._stage,)
                    event = RankEvent("collective", group=group, ranks=alone, label=action)
                    self._reductions[action.role] = self._add(event)
                case "norm":
                    self._norm(action)
                case "step":
                    self._step(action)
        for kind in self._sent:
            self._release(kind, 0)
        self._add(RankEvent("host_wait", whole_device=True, label="the end of the update"))
        return self._events

    def _add(self, event: RankEvent) -> int:
        self._events.append(event)
        return len(self._events) - 1

    def _receive(self, action: Action, kind: MessageKind) -> None:
        group, peer = route(kind, self._stage, self._stages)
        event = RankEvent("receive", group=group, peer=peer, message=action.numbers, label=action)
        self._received[kind, action.numbers] = self._add(event)

    def _pass(self, action: Action) -> None:
        message = "receive_input" if action.kind == "forward" else "receive_gradient"
        received = self._received.pop((message, action.numbers), None)
        if received is not None:
            self._add(RankEvent("stream_wait", until=received, label=action))
        self._add(RankEvent("kernel", label=action))

    def _send(self, action: Action, kind: MessageKind) -> None:
        group, peer = route(kind, self._stage, self._stages)
        *numbers, chunk = action.numbers
        if kind == "send_output":
            chunk += self._stage == self._stages - 1  # the first stage needs it for its next chunk
        else:
            chunk -= self._stage == 0
        message = *numbers, chunk
        sent = RankEvent("send", group=group, peer=peer, message=message, label=action)
        self._sent[kind].append(self._add(sent))
        self._release(kind, self._kept[kind])

    def _release(self, kind: str, kept: int) -> None:
        while len(self._sent[kind]) > kept:
            self._add(RankEvent("stream_wait", until=self._sent[kind].popleft(), label="a send"))

    def _norm(self, action: Action) -> None:
        """Tied embeddings are summed, the sum of the norm starts, the statistics are copied."""
        every = tuple(range(self._stages))
        self._add(RankEvent("stream_wait", until=self._reductions.pop(action.role), label=action))
        ends = (0, self._stages - 1)
        if self._stages > 1 and self._stage in ends:
            tied = self._sum("embedding", ends, action)
            self._add(RankEvent("stream_wait", until=tied, label=action))
        self._add(RankEvent("kernel", label=action))
        norm = self._sum("norm", every, action)
        self._add(RankEvent("host_wait", label=action))
        self._norms[action.role] = norm, self._sum("world", every, action, on_host=True)

    def _sum(
        self, group: str, ranks: tuple[int, ...], action: Action, on_host: bool = False
    ) -> int:
        message = action.role, action.mini_batch
        event = RankEvent("collective", group=group, ranks=ranks, message=message, label=action)
        return self._add(event._replace(on_host=on_host))

    def _step(self, action: Action) -> None:
        norm, statistics = self._norms.pop(action.role)
        self._add(RankEvent("host_wait", until=statistics, label=action))
        self._add(RankEvent("stream_wait", until=norm, label=action))
        self._add(RankEvent("host_wait", label=action))
        self._add(RankEvent("kernel", label=action))

"""Routed experts: from the servers' responses to the trajectories of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.batch import Trajectory
from mppo.parallel.collectives import all_gather_varlen
from mppo.rollout.sglang.http_client import RequestRefused


@dataclass(frozen=True)
class RoutingShape:
    """Routed experts of a token: ``experts`` of them in each of ``layers`` layers."""

    layers: int
    experts: int


def routing_shape(hf_config: Any) -> RoutingShape:
    """The routing shape of a mixture of experts, from its Hugging Face config."""
    return RoutingShape(hf_config.num_hidden_layers, hf_config.num_experts_per_tok)


def decode_routed_experts(answer: bytes | None, shape: RoutingShape, tokens: int) -> Tensor:
    """The routed experts of one response: int16 ``[tokens, layers, k]``.

    Raises:
        RequestRefused: the server sent none, or a wrong number of them.
    """
    if answer is None:
        raise RequestRefused(
            "the server returned no routed experts: start it with --enable-return-routed-experts"
        )
    values = torch.frombuffer(bytearray(answer), dtype=torch.int32)
    if len(values) != tokens * shape.layers * shape.experts:
        raise RequestRefused(
            f"{len(values)} routed experts for {tokens} tokens, {shape.layers} layers and "
            f"{shape.experts} experts per token"
        )
    return values.to(torch.int16).view(tokens, shape.layers, shape.experts)


def attach(
    found: dict[int, Trajectory],
    rows: Sequence[Tensor],
    mine: Tensor,
    shape: RoutingShape,
    world: int,
    group: dist.ProcessGroup | None,
) -> dict[int, Trajectory]:
    """Attach routed experts to trajectories, on every rank; collective.

    Args:
        found: by ``prompt index * n + sample``.
        rows: every rank's packed responses (``pack_rows``).
        mine: int16, flat, the experts of this rank's finished responses, in their order.
        shape: routed experts of a token.
        world: ranks in ``group``.
        group: process group; None is the default one.

    Returns:
        The finished trajectories of ``rows``.
    """
    complete = {}
    # as bytes: not every backend gathers 16-bit integers
    for packed, received in zip(rows, all_gather_varlen(mine.view(torch.uint8), world, group)):
        keys = packed[1 : 1 + int(packed[0])].tolist()
        experts = received.cpu().view(torch.int16).view(-1, shape.layers, shape.experts)
        at = 0
        for key in keys:
            if found[key].finish_reason == "abort":
                continue  # its tokens are routed again when it is continued
            count = routed_tokens(found[key])
            complete[key] = replace(found[key], routed_experts=experts[at : at + count])
            at += count
    return complete


def routed_tokens(trajectory: Trajectory) -> int:
    """Tokens that the engine routed: all but the last generated token."""
    return len(trajectory.prompt.token_ids) + len(trajectory.response_ids) - 1

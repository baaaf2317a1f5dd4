"""The experts an engine's routers chose, from the servers' answers to every rank's trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.batch import Trajectory
from mppo.parallel.collectives import all_gather_varlen
from mppo.rollout.sglang.http_client import RequestRefused


@dataclass(frozen=True)
class RoutingShape:
    """What is chosen for each token: ``experts`` in each of ``layers``."""

    layers: int
    experts: int


def routing_shape(hf_config) -> RoutingShape:
    """The shape for a mixture of experts, from its Hugging Face config."""
    return RoutingShape(hf_config.num_hidden_layers, hf_config.num_experts_per_tok)


def decode_routed_experts(answer: bytes | None, shape: RoutingShape, tokens: int) -> Tensor:
    """One answer's choices: int16 ``[tokens, layers, k]``.

    Raises:
        RequestRefused: the server sent none, or for another number of tokens.
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
    """Trajectories with their experts, on every rank; collective.

    Args:
        found: by ``prompt index * n + sample``.
        rows: every rank's packed responses (``pack_rows``).
        mine: int16, this rank's choices in the order of its finished responses, flat.
        shape: what was chosen for each token.
        world: ranks in ``group``.
        group: process group; None is the default one.

    Returns:
        Those of ``rows`` that are finished.
    """
    complete = {}
    # a byte at a time: not every backend gathers 16-bit integers
    for packed, received in zip(rows, all_gather_varlen(mine.view(torch.uint8), world, group)):
        keys = packed[1 : 1 + int(packed[0])].tolist()
        experts = received.cpu().view(torch.int16).view(-1, shape.layers, shape.experts)
        at = 0
        for key in keys:
            if found[key].finish_reason == "abort":
                continue  # will be routed again when continued
            count = routed_tokens(found[key])
            complete[key] = replace(found[key], routed_experts=experts[at : at + count])
            at += count
    return complete


def routed_tokens(trajectory: Trajectory) -> int:
    """Tokens an engine routed: all but the last one generated."""
    return len(trajectory.prompt.token_ids) + len(trajectory.response_ids) - 1

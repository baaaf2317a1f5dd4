"""Routed experts in the servers' responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mppo.batch.episode import Episode
from mppo.rollout.sglang.http_client import RequestRefused


@dataclass(frozen=True)
class RoutingShape:
    """Routed experts of a token: ``experts`` of them in each of ``layers`` layers."""

    layers: int
    experts: int


def routing_shape(hf_config: Any) -> RoutingShape:
    return RoutingShape(hf_config.num_hidden_layers, hf_config.num_experts_per_tok)


def decode_routed_experts(answer: bytes | None, shape: RoutingShape, tokens: int) -> Tensor:
    """The routed experts of one response, int16 ``[tokens, layers, k]``; RequestRefused if the
    server sent none, or a wrong number of them."""
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


def routed_tokens(episode: Episode) -> int:
    """Tokens that the engine routed: all but the last generated token."""
    return len(episode.prompt.token_ids) + episode.length - 1

"""Responses in a server's answer to ``/generate``: read, and checked before anything uses them.

SGLang writes log-probabilities as ``[[-0.69,17,null],[-1.2e-7,4,null]]``: log-probability, token
id, no text. It has no binary form of them. No Python code runs per token here.
"""

from __future__ import annotations

import base64
import gc
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import chain
from types import NoneType
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from mppo.batch.episode import Episode, EpisodeTokens
from mppo.batch.prompt import Prompt
from mppo.rollout.sglang.http_client import RequestRefused
from mppo.safety.foreign_text import quoted
from mppo.safety.input_error import InputError

_REASONS = ("stop", "length", "abort")
_ROUNDING = 1e-3
"""Nats by which a log-probability may exceed 0 through rounding."""


@dataclass(frozen=True)
class ServerResponse:
    """One response as the server returned it.

    ``tokens`` int32 and ``logprobs`` float32 ``[L]``; a log-probability that is not finite is NaN.
    ``reason``: ``stop``, ``length`` or ``abort``. ``routed_experts``: int32 values, layer by layer
    for each routed token; None if not requested. ``cached``: tokens of the prompt that lay in the
    server's prefix cache; None: it does not say.
    """

    tokens: Tensor
    logprobs: Tensor
    reason: str
    weight_version: str
    routed_experts: bytes | None = None
    cached: int | None = None

    def with_final_reason(self, stop_tokens: Collection[int]) -> ServerResponse:
        """The response, with reason ``stop`` if it was aborted just after a stop token."""
        ended = len(self.tokens) and int(self.tokens[-1]) in stop_tokens
        if self.reason == "abort" and ended:
            return replace(self, reason="stop")
        return self

    def episode(self, prompt: Prompt) -> Episode:
        tokens = EpisodeTokens(self.tokens, self.logprobs)
        return Episode.sampled(prompt, tokens, self.reason, int(self.weight_version))

    def fault(self, max_tokens: int, vocab_size: int, version: int) -> str | None:
        """Why no engine that samples ``max_tokens`` from the model with the weights of ``version``
        returns this; None: one may."""
        if self.weight_version != str(version):
            return f"has weights of version {self.weight_version}, not {version}"
        if len(self.tokens) > max_tokens:
            return f"returned {len(self.tokens)} tokens, {max_tokens} were asked for"
        if len(self.tokens) and (largest := int(self.tokens.max())) >= vocab_size:
            return f"returned token {largest}, the model has {vocab_size}"
        if (self.logprobs > _ROUNDING).any():
            return f"returned a probability above 1 (log-probability {float(self.logprobs.max())})"
        return None


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


def parse_responses(text: bytes) -> list[ServerResponse]:
    """Read an answer to ``/generate``: JSON of one response or of a list of responses; InputError
    if it is not JSON, or a response has another form."""
    collects = gc.isenabled()
    gc.disable()  # a collection would visit the millions of objects that live until the end of this
    try:
        return _read_all(text)
    finally:
        if collects:
            gc.enable()


def _read_all(text: bytes) -> list[ServerResponse]:
    answer = orjson.loads(text)
    return [_read(each) for each in (answer if isinstance(answer, list) else [answer])]


def _read(answer: Any) -> ServerResponse:
    try:
        ids, meta = answer["output_ids"], answer["meta_info"]
        entries = meta.get("output_token_logprobs") or []
        logprobs, entry_ids, *_ = zip(*entries, strict=True) if entries else ((), ())
        reason, experts = meta["finish_reason"], meta.get("routed_experts")
        if not isinstance(reason, dict) or reason.get("type") not in _REASONS:
            raise InputError(f"finish_reason is {quoted(str(reason))}")
        if len(ids) != len(entry_ids):
            raise InputError(f"{len(ids)} tokens with {len(entry_ids)} log-probabilities")
        if set(map(type, chain(ids, entry_ids))) - {int}:
            raise InputError("a token id is not an integer")
        if ids != list(entry_ids):
            raise InputError("output_ids differ from the ids of the log-probabilities")
        if ids and not 0 <= min(ids) <= max(ids) < 1 << 31:
            raise InputError(f"token ids from {min(ids)} to {max(ids)}")
        if set(map(type, logprobs)) - {float, int, NoneType}:
            raise InputError("a log-probability is not a number")
        cached = meta.get("cached_tokens")
        if cached is not None and (type(cached) is not int or cached < 0):
            raise InputError(f"cached_tokens is {quoted(str(cached))}")
        return ServerResponse(
            torch.from_numpy(np.array(ids, dtype=np.int32)),
            torch.from_numpy(np.array(logprobs, dtype=np.float64)).float(),
            reason["type"],
            str(meta.get("weight_version", "")),
            base64.b64decode(experts, validate=True) if experts else None,
            cached,
        )
    except (LookupError, TypeError, AttributeError) as error:
        why = f"not a response with tokens: {type(error).__name__} {quoted(str(error))}"
        raise InputError(why) from error

"""Turns by the SGLang servers of a rank; requests of one session go to one server."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from mppo.batch.prompt import Prompt
from mppo.recipe.sections.rollout import SamplingConfig
from mppo.rollout.sglang.fleet import Fleet
from mppo.rollout.sglang.http_client import RequestRefused, ServerLost
from mppo.rollout.sglang.server_api import SGLangApi, sampling_parameters
from mppo.rollout.sglang.server_response import RoutingShape, ServerResponse, decode_routed_experts
from mppo.rollout.turns import EngineLost, Turn, TurnRequest, deal_prompts


class ServerTurns:
    """See ``TurnEngine``; ``calls`` requests at the same time on each server, all with weights of
    ``version``."""

    at_once = 1

    def __init__(
        self,
        fleet: Fleet,
        version: int,
        stop_tokens: tuple[int, ...],
        vocab_size: int,
        calls: int,
        routing: RoutingShape | None = None,
    ) -> None:
        self._fleet, self._version, self._routing = fleet, version, routing
        self._stops, self._vocab_size = stop_tokens, vocab_size
        self.calls = calls * max(1, len(fleet.mine))
        self._aborting = threading.Event()

    def homes(self, prompts: Sequence[Prompt], n: int) -> dict[int, int]:
        """See ``TurnEngine``; the samples of a prompt share a server, which has it in its cache."""
        return deal_prompts(prompts, n, self._fleet.heads)

    def generate(
        self, requests: Sequence[TurnRequest], sampling: SamplingConfig, seed: int
    ) -> list[Turn]:
        """See ``TurnEngine``; the servers' seeds are their own."""
        return [self._turn(request, sampling) for request in requests]

    def abort(self) -> None:
        self._aborting.set()
        for api in self._fleet.apis.values():
            with suppress(ServerLost, RequestRefused):
                api.abort_all()

    def _turn(self, request: TurnRequest, sampling: SamplingConfig) -> Turn:
        while apis := self._fleet.apis:
            server = _server_of(request.session, apis)
            try:
                return self._ask(apis[server], request, sampling)
            except ServerLost as lost:
                if self._aborting.is_set():
                    break
                self._fleet.lost[server] = str(lost)
        raise EngineLost(f"no server is left: {self._fleet.lost}")

    def _ask(self, api: SGLangApi, request: TurnRequest, sampling: SamplingConfig) -> Turn:
        stops = sorted({*self._stops, *sampling.stop_token_ids})
        parameters = sampling_parameters(sampling, request.max_tokens, stops)
        routed = self._routing is not None
        (answer,) = api.generate([request.token_ids.tolist()], parameters, routed)
        if fault := answer.fault(request.max_tokens, self._vocab_size, self._version):
            raise ServerLost(api.url, fault)
        answer = answer.with_final_reason(stops)
        found = answer.tokens, answer.logprobs, answer.reason
        experts = self._experts(len(request.token_ids) + len(answer.tokens) - 1, answer)
        return Turn(*found, self._version, answer.cached, experts)

    def _experts(self, tokens: int, answer: ServerResponse) -> Tensor | None:
        """See ``Turn``; those of an aborted turn come with the rest of it."""
        shape = self._routing
        if shape is None:
            return None
        if answer.reason == "abort":
            return torch.full((tokens, shape.layers, shape.experts), -1, dtype=torch.int16)
        return decode_routed_experts(answer.routed_experts, shape, tokens)


def _server_of(session: str, apis: Mapping[int, SGLangApi]) -> int:
    """The server of a session, the same one as long as it is not lost."""
    digests = {s: hashlib.blake2b(f"{s}/{session}".encode(), digest_size=8).digest() for s in apis}
    return max(digests, key=lambda server: digests[server])

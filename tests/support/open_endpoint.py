"""An endpoint of a small model that real clients reach over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
from policy_generator import PolicyGenerator, Sampled

from mppo.agents.endpoint.server import Endpoint
from mppo.agents.endpoint.session import Limits, Session
from mppo.agents.endpoint.sessions import Sessions
from mppo.agents.endpoint.tree import Leaf
from mppo.batch.episode import NO_WEIGHTS


@dataclass
class OpenEndpoint:
    """A running endpoint."""

    generator: PolicyGenerator
    sessions: Sessions
    endpoint: Endpoint
    clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    def client(self, session: Session, **options: Any) -> openai.AsyncOpenAI:
        """OpenAI's client, unmodified."""
        options = {
            "base_url": session.base_url,
            "api_key": session.key,
            "max_retries": 0,
            **options,
        }
        self.clients.append(openai.AsyncOpenAI(**options))
        return self.clients[-1]

    def http(self, token: str = "") -> httpx.AsyncClient:
        """A client that sends anything."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.AsyncClient(base_url=self.endpoint.url, headers=headers, timeout=600)


@asynccontextmanager
async def open_endpoint(
    generator: PolicyGenerator | None = None, limits: Limits | None = None, **options: Any
) -> AsyncIterator[OpenEndpoint]:
    """An endpoint, stopped at the end."""
    generator = generator or PolicyGenerator()
    sessions = Sessions(generator.tokenizer, generator, limits, **options)
    endpoint = Endpoint(sessions)
    await endpoint.start()
    running = OpenEndpoint(generator, sessions, endpoint)
    try:
        yield running
    finally:
        for client in running.clients:
            await client.close()
        await endpoint.stop()


def turns_of(leaves: Sequence[Leaf], sampled: Sequence[Sampled]) -> list[Sampled]:
    """The sampled turns that leaves consist of, in their order.

    Asserts that each turn lies behind exactly the tokens it was sampled after, with its own ids,
    log-probabilities and version, and that no turn is the policy's twice.
    """
    left, found = list(sampled), []
    for leaf in leaves:
        whole = [*leaf.context_ids.tolist(), *leaf.ids.tolist()]
        assert len(leaf.ids) == len(leaf.logprobs) == sum(count for _, count in leaf.parts)
        assert leaf.parts[0][0] != NO_WEIGHTS != leaf.parts[-1][0]
        end = 0
        for version, count in leaf.parts:
            at, end = end, end + count
            if version == NO_WEIGHTS:
                assert not leaf.logprobs[at:end].any()
            while version != NO_WEIGHTS and at < end:  # turns without others' tokens between them
                before = tuple(whole[: len(leaf.context_ids) + at])
                turn = next(
                    each
                    for each in left
                    if each.given == before
                    and each.turn.version == version
                    and leaf.ids[at:end][: len(each.turn.ids)].equal(each.turn.ids)
                    and leaf.logprobs[at:end][: len(each.turn.ids)].equal(each.turn.logprobs)
                )
                left.remove(turn)
                found.append(turn)
                at += len(turn.turn.ids)
    return found


def assert_exact(leaves: Sequence[Leaf], sampled: Sequence[Sampled]) -> None:
    """The leaves consist of all sampled turns, each once."""
    assert len(turns_of(leaves, sampled)) == len(sampled)

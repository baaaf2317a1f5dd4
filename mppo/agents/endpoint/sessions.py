"""The open sessions of an endpoint."""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from mppo.agents.conversation import Message
from mppo.agents.endpoint.calls import ended
from mppo.agents.endpoint.messages import read_messages, read_tools
from mppo.agents.endpoint.prompts import PromptText
from mppo.agents.endpoint.refusal import INVALID_KEY, Refusal
from mppo.agents.endpoint.session import Generator, Limits, Policy, Session
from mppo.agents.endpoint.tool_calls import ToolParser, parse_hermes
from mppo.agents.endpoint.tree import Leaf
from mppo.recipe.sections.rollout import SamplingConfig

_REMEMBERED = 65536
"""Closed sessions whose clients still get 409 instead of 404."""


@dataclass(frozen=True)
class EpisodeRecord:
    """A session that has ended.

    Args:
        leaves: sequences to train on, in order of creation; the last one is the episode's answer.
        is_used_up: whether the agent asked for more turns or tokens than the limits allow.
        messages: the conversation up to the last leaf's end.
    """

    leaves: tuple[Leaf, ...]
    reward: float | None
    numbers: Mapping[str, float]
    turns: int
    error: str | None
    is_used_up: bool
    messages: tuple[Message, ...]


class Sessions:
    """Opens and closes sessions; all calls come from one event loop. Requests that ask for another
    ``sampling`` than that of training are refused; the endpoint sets ``url``."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        generator: Generator,
        limits: Limits | None = None,
        parse_tools: ToolParser = parse_hermes,
    ) -> None:
        self.policy = Policy(PromptText(tokenizer), generator, limits or Limits(), parse_tools)
        self.url = ""
        self._open: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}
        self._closed: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self,
        messages: Sequence[Message] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        token_ids: Sequence[int] | None = None,
        sampling: SamplingConfig | None = None,
    ) -> Session:
        """Open a session; Refusal if too many are open.

        Args:
            token_ids: the tokens of a first request with exactly these messages and tools.
            sampling: of this session, for example in validation; None: that of training.
        """
        if len(self._open) >= self.policy.limits.sessions:
            raise Refusal(429, f"{len(self._open)} sessions are open: close some")
        name, key = secrets.token_hex(16), f"sk-{secrets.token_urlsafe(24)}"
        policy = replace(self.policy, sampling=sampling or self.policy.sampling)
        session = Session(name, key, f"{self.url}/sessions/{name}/v1", policy)
        if messages and token_ids is not None:
            session.knows(read_messages(messages), read_tools(tools), token_ids)
        self._open[name] = self._by_key[key] = session
        return session

    async def close(self, session_id: str, error: str | None = None) -> EpisodeRecord:
        """End a session and return its record. ``error``: why the episode failed. Refusal if no
        open session has this id."""
        session = self.session(session_id)
        del self._open[session.id], self._by_key[session.key]
        self._closed[session.id] = session.key
        while len(self._closed) > _REMEMBERED:
            self._closed.popitem(last=False)
        await session.end()
        last = session.tree.last_turns()
        return EpisodeRecord(
            leaves=tuple(session.tree.leaves()),
            reward=session.reward,
            numbers=session.numbers,
            turns=len(session.tree),
            error=error if error is not None else session.failure,
            is_used_up=session.is_used_up,
            messages=tuple(last[-1].messages()) if last else (),
        )

    async def end_all(self) -> None:
        """Answer no more requests; the records stay until they are taken."""
        for session in list(self._open.values()):
            await session.end()
        self.policy.prompts.close()

    def session(self, session_id: str, token: str | None = None) -> Session:
        """The session of an id; Refusal if there is none, it is closed, or ``token``, what the
        client sends as its API key (None: the owner asks), is not its key or id."""
        found = self._open.get(session_id)
        if found is None:
            if session_id in self._closed:
                raise ended()
            raise Refusal(404, "no session has this id")
        if token is not None and not (same(token, found.key) or same(token, found.id)):
            raise Refusal(401, "the API key is not that of the session", INVALID_KEY)
        return found

    def session_of(self, token: str) -> Session:
        """The session with this key or id; Refusal if there is none, or it is closed."""
        found = self._by_key.get(token) or self._open.get(token)
        if found is not None:
            return found
        if token in self._closed or token in self._closed.values():
            raise ended()
        raise Refusal(401, "no session has this API key: send Authorization: Bearer", INVALID_KEY)


def same(token: str, secret: str) -> bool:
    """Whether a client knows a secret; takes the same time for all wrong ones."""
    return bool(secret) and hmac.compare_digest(token.encode(), secret.encode())

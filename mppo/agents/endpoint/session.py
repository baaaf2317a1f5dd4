"""One episode's session: an agent asks for turns, and the tree keeps their tokens."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from mppo.agents.conversation import Message
from mppo.agents.endpoint.ask import Ask, Choice, HttpReply, PolicyAnswer
from mppo.agents.endpoint.calls import Calls, ended
from mppo.agents.endpoint.messages import history_keys, next_key, tool_call
from mppo.agents.endpoint.prompts import PromptText
from mppo.agents.endpoint.refusal import TOO_LONG, Refusal, invalid
from mppo.agents.endpoint.tool_calls import ToolParser
from mppo.agents.endpoint.tree import SampledTurn, TokenTree, TurnNode, merged_parts
from mppo.recipe.sections.rollout import SamplingConfig
from mppo.rewards.result import number
from mppo.rollout.turns import Turn

_T = TypeVar("_T")
_PAUSE_S = 0.05
"""Between two requests to an engine that was interrupted before its first token."""


class Generator(Protocol):
    async def generate(self, token_ids: Sequence[int], max_tokens: int, session: str) -> Turn:
        """Generate what follows all tokens before the turn, at most ``max_tokens`` (at least 1);
        requests of one session share prefixes. A cancelled call is aborted in the engine."""
        ...


@dataclass(frozen=True)
class Limits:
    """What a session may use. ``context_tokens``: of a sequence, prompt and all turns together;
    ``max_tokens``: of a turn, None: as many as the context leaves; ``retry_s``: seconds that a
    request goes on, and its answer is kept, after its client has gone."""

    context_tokens: int = 32768
    max_tokens: int | None = None
    turns: int = 128
    concurrent_calls: int = 64
    sessions: int = 16384
    body_bytes: int = 16 << 20
    retry_s: float = 5.0


@dataclass(frozen=True)
class Policy:
    """What all sessions share."""

    prompts: PromptText
    generator: Generator
    limits: Limits
    parse_tools: ToolParser
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    model: str = "policy"


@dataclass(frozen=True)
class _Place:
    """Where a turn belongs in the tree. ``context``: all tokens before it; ``given``: those after
    the parent; ``asked``: their messages."""

    parent: TurnNode | None
    context: list[int]
    given: list[int]
    asked: Sequence[Message]
    key: Any


@dataclass(eq=False)
class Session:
    """A session. Nobody can guess its id, which names it in URLs; ``key``: the client's API key.

    Attributes:
        reward, numbers: as the agent reports them.
        failure: why the engine did not answer the last request.
        is_used_up: whether a request was refused because it was one turn or some tokens too many.
        previous: messages by the id of an answer, for an API that names it.
    """

    id: str
    key: str
    base_url: str
    policy: Policy
    tree: TokenTree = field(default_factory=TokenTree)
    reward: float | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    is_used_up: bool = False
    previous: dict[str, list[Message]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = self.policy.limits
        self.calls = Calls(limits.concurrent_calls, limits.retry_s, self._forget)
        self._turns = 0
        self._openings: dict[str, list[int]] = {}
        self._text_lengths: set[int] = set()

    @property
    def anthropic_url(self) -> str:
        """``base_url`` for a client of Anthropic's, which adds the version itself."""
        return self.base_url.removesuffix("/v1")

    def knows(
        self, messages: Sequence[Message], tools: Sequence[Any], token_ids: Sequence[int]
    ) -> None:
        """Take these tokens for a conversation that begins with exactly these messages."""
        self._openings[history_keys(tools, messages)[-1]] = list(token_ids)

    def report(self, reward: Any, numbers: Any) -> None:
        """Take what the agent says of the episode; Refusal of a value that is not a finite
        number."""
        found = None if reward is None else _finite(reward, "reward")
        if numbers is not None and not isinstance(numbers, Mapping):
            raise invalid("numbers is an object with numbers", "numbers")
        more = {str(k): _finite(v, f"numbers.{k}") for k, v in (numbers or {}).items()}
        self.reward = self.reward if found is None else found
        self.numbers.update(more)

    async def end(self) -> None:
        """Answer no more requests."""
        await self.calls.close()

    async def answer(self, ask: Ask) -> PolicyAnswer:
        """Turns of the policy; Refusal if the session has ended or used up its turns, or the
        request does not fit."""
        limits = self.policy.limits
        if self.calls.is_closed:
            raise ended()
        if self._turns + ask.n > limits.turns:
            self.is_used_up = True
            why = f"the session has used its {limits.turns} turns"
            raise Refusal(429, why, retry=False)
        self._turns += ask.n
        try:
            place = await self._place(ask)
            room = limits.context_tokens - len(place.context)
            if room < 1:
                self.is_used_up = True
                why = (
                    f"the conversation has {len(place.context)} tokens, and the context window "
                    f"{limits.context_tokens}"
                )
                raise Refusal(400, why, TOO_LONG, retry=False)
            given = (room, ask.max_tokens, limits.max_tokens)
            most = min(limit for limit in given if limit is not None)
            turns = await _all([self._sample(place.context, most) for _ in range(ask.n)])
        except BaseException:
            self._turns -= ask.n
            raise
        choices = [self._choice(ask, place, turn) for turn in turns]
        return PolicyAnswer(place.context, choices)

    async def count(self, ask: Ask) -> int:
        """Number of tokens before the turn that a request asks for."""
        return len((await self._place(ask)).context)

    async def _place(self, ask: Ask) -> _Place:
        """The deepest turn that the request continues, and the tokens after it."""
        prompts = self.policy.prompts
        if ask.prompt is not None:
            return await self._place_of_prompt(ask.prompt)
        keys = history_keys(ask.tools, ask.messages)
        parent, known = self.tree.deepest(keys)
        rest = ask.messages[known:]
        if parent is None:
            given = self._openings.get(keys[-1]) or await prompts.opening(rest, ask.tools)
            return _Place(None, given, given, rest, keys[-1])
        given = await prompts.following(rest, int(parent.turn.ids[-1]))
        return _Place(parent, parent.token_ids() + given, given, rest, keys[-1])

    async def _place_of_prompt(self, prompt: str | tuple[int, ...]) -> _Place:
        """As ``_place``, for a prompt that is continued without a chat template."""
        prompts = self.policy.prompts
        if not isinstance(prompt, str):
            parent = self.tree.deepest_of_tokens(prompt)
            given = list(prompt[0 if parent is None else parent.length :])
            asked = [{"role": "user", "content": prompts.decode(given, special=True)}]
            return _Place(parent, list(prompt), given, asked, object())
        lengths = sorted(each for each in self._text_lengths if each <= len(prompt))
        parent, known = self.tree.deepest([("text", prompt[:length]) for length in lengths])
        rest = prompt[lengths[known - 1] :] if parent is not None else prompt
        asked = [{"role": "user", "content": rest}]
        if parent is None:
            given = await prompts.text(rest)
            return _Place(None, given, given, asked, ("text", prompt))
        given = await prompts.following_text(rest) if rest else []
        context = parent.token_ids() + given
        return _Place(parent, context, given, asked if rest else [], ("text", prompt))

    async def _sample(self, context: Sequence[int], most: int) -> SampledTurn:
        """Sample a turn. If an update interrupts the engine, ask it for the rest."""
        ids: list[int] = []
        logprobs, parts, reason, experts = [], [], "abort", None
        while reason == "abort" and len(ids) < most:
            tokens = [*context, *ids]
            try:
                turn = await self.policy.generator.generate(tokens, most - len(ids), self.id)
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
                raise
            ids += turn.ids.tolist()
            logprobs.append(turn.logprobs)
            parts.append((turn.version, len(turn.ids)))
            reason, experts = turn.finish_reason, turn.experts
            if not len(turn.ids):
                await asyncio.sleep(_PAUSE_S)
        self.failure = None if ids else "the engine generated no token"
        if not ids:
            raise Refusal(503, "the engine generated no token")
        reason = "length" if reason == "abort" else reason
        found = torch.tensor(ids, dtype=torch.int32), torch.cat(logprobs).float()
        return SampledTurn(*found, merged_parts(parts), reason, experts)

    def _choice(self, ask: Ask, place: _Place, turn: SampledTurn) -> Choice:
        prompts = self.policy.prompts
        turn, stop = cut_at(turn, ask.stop, prompts)
        text, calls = shown_text(turn, stop, prompts), []
        if ask.tools:
            whole = shown_text(turn, stop, prompts, special=True)
            rest, calls = self.policy.parse_tools(whole, ask.tools)
            text = rest if calls else text
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                tool_call(f"call_{uuid.uuid4().hex[:24]}", name, arguments)
                for name, arguments in calls
            ]
        if ask.prompt is None:
            key = next_key(place.key, message)
        elif isinstance(ask.prompt, str):
            key = ("text", ask.prompt + text)
            self._text_lengths.add(len(key[1]))
        else:
            key = place.key
        node = self.tree.add(place.parent, place.given, turn, place.asked, message, key)
        reason = "tool_calls" if calls and turn.finish_reason == "stop" else turn.finish_reason
        return Choice(message, reason, stop, node)

    def _forget(self, reply: HttpReply) -> None:
        for node in reply.nodes:
            self.tree.discard(node)


def cut_at(
    turn: SampledTurn, stops: Sequence[str], prompts: PromptText
) -> tuple[SampledTurn, str | None]:
    """A turn up to the token that completes the first of some texts, and that text.

    The tokens after it are dropped, as if the engine had stopped there: what is left has the
    policy's distribution.
    """

    def first(count: int) -> str | None:
        text = prompts.decode(turn.ids[:count].tolist())
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        return min(found)[1] if found else None

    if not stops or first(len(turn.ids)) is None:
        return turn, None
    low, high = 1, len(turn.ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if first(middle) else (middle + 1, high)
    parts, left = [], high
    for version, count in turn.parts:
        parts.append((version, min(count, left)))
        left -= parts[-1][1]
    ids, logprobs, experts = turn.ids[:high], turn.logprobs[:high], turn.experts
    if experts is not None:
        experts = experts[: len(experts) - len(turn.ids) + high]
    return SampledTurn(ids, logprobs, merged_parts(parts), "stop", experts), first(high)


def shown_text(
    turn: SampledTurn, stop: str | None, prompts: PromptText, special: bool = False
) -> str:
    """The text of a turn without the token or the text that ended it."""
    ids = turn.ids.tolist()
    if stop is not None:
        return prompts.decode(ids, special).partition(stop)[0]
    return prompts.decode(ids[:-1] if turn.finish_reason == "stop" else ids, special)


async def _all(coroutines: Sequence[Awaitable[_T]]) -> list[_T]:
    """The results of all; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _finite(value: Any, where: str) -> float:
    found = None if isinstance(value, bool) else number(value)
    if found is None or not math.isfinite(found):
        raise invalid(f"{where} is not a finite number", where)
    return found

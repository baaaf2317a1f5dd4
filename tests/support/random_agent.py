"""An agent that treats its histories as agents do, at random, by an unmodified client of OpenAI."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import torch
from policy_generator import Sampled

from mppo.rollout.turns import Turn

RETRY = {"x-stainless-retry-count": "1"}
Messages = list[dict[str, Any]]


@dataclass
class RandomAgent:
    """An agent that does what agents do with a history, at random.

    Args:
        client, http: of one session; ``http`` sends what is left alone.
        base_url, key: of the session.
        chance: decides.
        stops: texts at which answers may be cut.

    Attributes:
        histories: conversations that end with an answer of the policy, by the tokens up to there.
        read: the turns whose answers it has got.
        left: requests whose answers it did not wait for.
    """

    client: openai.AsyncOpenAI
    http: httpx.AsyncClient
    base_url: str
    key: str
    chance: random.Random
    stops: tuple[str | None, ...] = (None, "e")
    histories: list[tuple[Messages, list[int]]] = field(default_factory=list)
    read: list[Sampled] = field(default_factory=list)
    left: int = 0
    did: Counter[str] = field(default_factory=Counter)

    async def live(self) -> None:
        """Do some things, some of them at the same time."""
        for _ in range(self.chance.randint(1, 5)):
            count = self.chance.choice((1, 1, 1, 2, 3))
            await asyncio.gather(*(self.do_one(alone=count == 1) for _ in range(count)))

    async def do_one(self, alone: bool) -> None:
        """Continue, branch, rewrite, shorten, repeat or leave."""
        kind = self.chance.choice(
            ("begin", "append", "append", "append", "rewrite", "shorten", "retry", "leave")
        )
        messages, known = self.chance.choice(self.histories) if self.histories else ([], [])
        if not messages or kind == "begin":
            messages, known = [], []
        if kind == "rewrite":
            at = self.chance.randrange(len(messages) or 1)
            messages = [
                {**each, "content": "new"} if i == at else each for i, each in enumerate(messages)
            ]
            known = []
        elif kind == "shorten":
            messages, known = messages[self.chance.randrange(len(messages) or 1) :], []
        self.did[kind] += 1
        said = "".join(self.chance.choices("abc \u00e9\U0001f600", k=self.chance.randint(0, 5)))
        role = self.chance.choice(("user", "user", "tool", "system"))
        messages = [*messages, {"role": role, "content": said}]
        if kind == "leave":
            return await self.leave(messages)
        # of turns with equal texts the endpoint continues the last one: here, the only one
        known = known if alone and not self.left else []
        options = {"n": self.chance.choice((1, 1, 1, 2)), "stop": self.chance.choice(self.stops)}
        first = await self.ask(messages, known, options)
        if kind == "retry":
            again = await self.create(messages, options, extra_headers=RETRY)
            assert again.id == first.id or not alone, "a retry has another answer"
        return None

    async def create(self, messages: Messages, options: dict[str, Any], **more: Any) -> Any:
        return await self.client.chat.completions.create(
            model="m", messages=messages, extra_body={"return_token_ids": True}, **options, **more
        )

    async def ask(self, messages: Messages, known: list[int], options: dict[str, Any]) -> Any:
        """Get an answer and remember its tokens."""
        answer = await self.create(messages, options)
        for choice in answer.choices:
            message = choice.message.model_dump()
            given, ids = message["prompt_token_ids"], message["generation_token_ids"]
            assert given[: len(known)] == known, "what was sampled is not tokenised again"
            logprobs = torch.tensor(message["generation_log_probs"])
            turn = Turn(torch.tensor(ids, dtype=torch.int32), logprobs, "", 0)
            self.read.append(Sampled(tuple(given), turn))
            shown = {"role": "assistant", "content": self.varied(message["content"])}
            history = [*messages, shown]
            if not self.is_known(history):
                self.histories.append((history, [*given, *ids]))
        return answer

    def is_known(self, history: Messages) -> bool:
        def compared(messages: Messages) -> list[Any]:
            return [
                [each["role"], each["content"].strip() if each["role"] == "assistant" else
                 each["content"]]
                for each in messages
            ]  # fmt: skip

        same = [
            i for i, (old, _) in enumerate(self.histories) if compared(old) == compared(history)
        ]
        for i in same:
            self.histories[i] = (self.histories[i][0], [])
        return bool(same)

    def varied(self, content: str) -> str:
        """The content with what clients change in passing."""
        return content + self.chance.choice(("", "", "\n", " "))

    async def leave(self, messages: Messages) -> None:
        """Close the connection before the answer; sometimes, ask again."""
        body = {"messages": messages, "return_token_ids": True}
        self.left += 1
        url = f"{self.base_url}/chat/completions"
        headers = {"Authorization": f"Bearer {self.key}"}
        seconds = self.chance.choice((0.002, 0.01, 0.05))
        try:
            await asyncio.wait_for(self.http.post(url, json=body, headers=headers), seconds)
        except (asyncio.TimeoutError, httpx.HTTPError):
            if self.chance.random() < 0.5:
                found = await self.http.post(url, json=body, headers=headers | RETRY)
                assert found.status_code == 200, found.text


def identity(each: Sampled) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    return each.given, tuple(each.turn.ids.tolist()), tuple(each.turn.logprobs.tolist())

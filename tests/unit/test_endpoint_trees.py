"""Random episodes: what is trained on is what the generator sampled, each token once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
import torch
from open_endpoint import OpenEndpoint, open_endpoint, turns_of
from policy_generator import PolicyGenerator, Sampled, marks_of

from mppo.agents.endpoint.session import Limits, Session
from mppo.agents.endpoint.turn import Turn

TREES, AT_ONCE = 320, 24
RETRY = {"x-stainless-retry-count": "1"}
Messages = list[dict[str, Any]]


@dataclass
class Agent:
    """An agent that does what agents do with a history, at random.

    Attributes:
        histories: conversations that end with an answer of the policy, by the tokens up to there.
        read: the turns whose answers it has got.
        left: requests whose answers it did not wait for.
    """

    client: openai.AsyncOpenAI
    http: httpx.AsyncClient
    session: Session
    chance: random.Random
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
        options = {"n": self.chance.choice((1, 1, 1, 2)), "stop": self.chance.choice((None, "e"))}
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
        url = f"{self.session.base_url}/chat/completions"
        headers = {"Authorization": f"Bearer {self.session.key}"}
        seconds = self.chance.choice((0.002, 0.01, 0.05))
        try:
            await asyncio.wait_for(self.http.post(url, json=body, headers=headers), seconds)
        except (asyncio.TimeoutError, httpx.HTTPError):
            if self.chance.random() < 0.5:
                found = await self.http.post(url, json=body, headers=headers | RETRY)
                assert found.status_code == 200, found.text


async def one_tree(running: OpenEndpoint, http: httpx.AsyncClient, seed: int) -> Agent:
    """An agent's life, and what must hold of its record."""
    session, chance = running.sessions.open(), random.Random(seed)
    client = running.client(session, http_client=http)
    agent = Agent(client, http, session, chance)
    await agent.live()
    running.generator.version += chance.random() < 0.1
    record = await running.sessions.close(session.id)
    sampled = [each for each in running.generator.sampled if each.session == session.id]
    running.generator.sampled[:] = [
        each for each in running.generator.sampled if each.session != session.id
    ]
    kept = as_kept(sampled, agent.read)
    found = turns_of(record.leaves, kept)
    for leaf in record.leaves:
        assert leaf.experts is not None
        assert leaf.experts.equal(marks_of([*leaf.context_ids.tolist(), *leaf.ids.tolist()]))
    assert len(found) == record.turns
    missing = Counter(map(identity, agent.read)) - Counter(map(identity, found))
    assert not missing, "an answer that was read is in no leaf"
    assert len(found) - len(agent.read) <= agent.left
    return agent


def identity(each: Sampled) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    return each.given, tuple(each.turn.ids.tolist()), tuple(each.turn.logprobs.tolist())


def as_kept(sampled: list[Sampled], read: list[Sampled]) -> list[Sampled]:
    """What was sampled, cut where a stop text has cut what the agent has read."""
    left, found = list(read), []
    for each in sampled:
        cut = next(
            (
                mine
                for mine in left
                if mine.given == each.given
                and each.turn.ids[: len(mine.turn.ids)].equal(mine.turn.ids)
                and each.turn.logprobs[: len(mine.turn.ids)].equal(mine.turn.logprobs)
            ),
            None,
        )
        if cut is None:
            found.append(each)
            continue
        left.remove(cut)
        count, turn = len(cut.turn.ids), each.turn
        turn = Turn(turn.ids[:count], turn.logprobs[:count], turn.finish_reason, turn.version)
        found.append(Sampled(each.given, turn, each.session))
    assert not left, "an answer holds tokens that were not sampled"
    return found


@pytest.mark.parametrize("block", range(4))
def test_random_episodes_hold_exactly_what_was_sampled(block):
    did: Counter[str] = Counter()

    async def run():
        generator = PolicyGenerator(longest=3, delay_s=0.02)
        limits = Limits(retry_s=0.005, turns=1000)
        client = httpx.AsyncClient(timeout=None)  # a slow machine's answers take their time
        async with open_endpoint(generator, limits) as running, client as http:
            seeds = iter(range(block * TREES // 4, (block + 1) * TREES // 4))

            async def lives():
                for seed in seeds:
                    did.update((await one_tree(running, http, seed)).did)

            await asyncio.gather(*(lives() for _ in range(AT_ONCE)))
            assert not len(running.sessions)

    asyncio.run(run())
    assert min(did.values()) > TREES // 40, did

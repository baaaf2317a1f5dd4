"""Random episodes: what is trained on is what the generator sampled, each token once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx
import pytest
from open_endpoint import OpenEndpoint, open_endpoint, turns_of
from policy_generator import PolicyGenerator, Sampled, marks_of
from random_agent import RandomAgent, identity

from mppo.agents.endpoint.session import Limits
from mppo.rollout.turns import Turn

TREES, AT_ONCE = 320, 24


async def one_tree(running: OpenEndpoint, http: httpx.AsyncClient, seed: int) -> RandomAgent:
    """An agent's life, and what must hold of its record."""
    session, chance = running.sessions.open(), random.Random(seed)
    client = running.client(session, http_client=http)
    agent = RandomAgent(client, http, session.base_url, session.key, chance)
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

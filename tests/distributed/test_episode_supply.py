"""Agents' episodes on two ranks, of which a batch takes the prompts that are complete first."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import openai
import pytest
import torch
import torch.distributed as dist
from agent_case import PROMPTS, SAMPLING, local_engine
from ranks import start_ranks

from mppo.agents.episode_engine import EpisodeEngine
from mppo.agents.episode_program import opening_of
from mppo.batch.episode import EpisodeResult
from mppo.hub.builtin import byte_tokenizer
from mppo.recipe.sections.agent import AgentConfig
from mppo.rollout.engine import GenerationRequest

REQUEST = GenerationRequest(PROMPTS, SAMPLING, 24, 11, num_prompts_needed=2)


class _OneTurn:
    """A program that asks the policy once, in this process; or one that never ends."""

    waits = False

    async def start(self) -> None:
        pass

    async def run(self, session, prompt) -> EpisodeResult:
        if self.waits:
            await asyncio.Event().wait()
        where = {"base_url": session.base_url, "api_key": session.key, "timeout": None}
        async with openai.AsyncOpenAI(**where) as client:
            await client.chat.completions.create(model="policy", messages=opening_of(prompt))
        return EpisodeResult(1.0)

    async def stop(self) -> None:
        pass


def _worker(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    inner = local_engine()
    inner._rank, inner._world = rank, world
    config = AgentConfig(run="a.py:run")
    program = _OneTurn()
    place = {"goes_on": True, "rank": rank, "world": world}
    engine = EpisodeEngine(inner, program, byte_tokenizer(), config, 64, **place)
    try:
        found = engine.submit(REQUEST).collect()
        assert len(found) == 2 * SAMPLING.n
        program.waits = rank == 0

        def on_response(places, episodes) -> None:
            raise OSError("no space left")

        others = [replace(each, uid=each.uid + 1) for each in PROMPTS]
        pending = engine.submit(replace(REQUEST, prompts=others, on_response=on_response))
        with pytest.raises(RuntimeError, match=r"rank 1: .*no space left"):
            pending.collect()
    finally:
        engine.stop()
        dist.destroy_process_group()


@pytest.mark.distributed
def test_ranks_take_a_batch_together_and_fail_together(tmp_path) -> None:
    start_ranks(_worker, (2, str(tmp_path / "store")), 2)

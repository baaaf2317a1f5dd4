"""Episodes of agents that talk to the policy over an endpoint, each at its own pace.

Every rank starts the agents of its own episodes, and answers their requests with its part of the
rollout engine, all at the same time. A slow agent delays no other one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from mppo.agents.endpoint.server import Endpoint
from mppo.agents.endpoint.session import Limits
from mppo.agents.endpoint.sessions import EpisodeRecord, Sessions
from mppo.agents.endpoint.tool_calls import tool_parser
from mppo.agents.program import EpisodeAccess, Program, failed, opening_of, task_of
from mppo.agents.turn_queue import TurnQueue
from mppo.batch.episode import Episode, EpisodeResult, EpisodeTokens
from mppo.batch.prompt import Prompt
from mppo.config.sections.agent import AgentConfig
from mppo.config.sections.rollout import SamplingConfig
from mppo.parallel.collectives import all_gather_objects, raise_on_any_rank, wait_for_ranks
from mppo.rewards.response import describe
from mppo.rollout.engine import GenerationRequest, RolloutEngine
from mppo.rollout.local.engine import LocalGeneration
from mppo.rollout.response_gather import gather_episodes
from mppo.rollout.turns import TurnEngine
from mppo.supervision import stop_request
from mppo.supervision.phase import tick
from mppo.supervision.stop_request import StepInterrupted
from mppo.weights.bucket import WeightBucket

_ATTEMPTS = 3
_POLL_S = 0.2


class EpisodeEngine:
    """A rollout engine whose responses are episodes of a program; a ``RolloutEngine``.

    Args:
        engine: generates the turns of the policy.
        program: runs the episodes.
        tokenizer: the policy's.
        config: the recipe's section.
        tokens: most tokens of a sequence, everything before it included.
        rank, world: this rank and the number of ranks.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        program: Program,
        tokenizer: PreTrainedTokenizerBase,
        config: AgentConfig,
        tokens: int,
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._engine, self._program, self._config = engine, program, config
        self._rank, self._world = rank, world
        self._queue = TurnQueue()
        limits = Limits(context_tokens=tokens, turns=config.max_turns)
        parse = tool_parser(config.tool_format)
        self._sessions = Sessions(tokenizer, self._queue, limits, parse_tools=parse)
        self._endpoint = Endpoint(self._sessions)
        # one loop for all requests: the agents' processes live on between them
        self._loop = asyncio.new_event_loop()

    def generate(self, request: GenerationRequest) -> list[Episode]:
        """See ``RolloutEngine.generate``.

        Raises:
            RuntimeError: on every rank, if an episode could not be run in several attempts.
            StepInterrupted: on every rank.
        """
        assert request.num_prompts_needed is None, "episodes are not aborted"
        found: dict[int, Episode] = {}
        for _ in range(_ATTEMPTS):
            turns, error = self._engine.turns(), None
            homes = turns.homes(request.prompts, request.sampling.n)
            places = [place for place, rank in sorted(homes.items()) if rank == self._rank]
            left = [place for place in places if place not in found]
            try:
                found |= self._loop.run_until_complete(self._run_all(turns, request, left))
            except StepInterrupted:
                pass  # raised again below, on all ranks at the same point
            except Exception as failure:
                why = f"{type(failure).__name__}: {failure}"
                error = f"rank {self._rank}: the agent's endpoint: {why}"
            wait_for_ranks(self._world)  # agents may take longer than any time limit
            stop_request.sync()
            raise_on_any_rank(error, self._world)
            missing = sum(place not in found for place in places)
            if not any(all_gather_objects(missing, self._world)):
                break
        else:
            why = f"the servers were lost in {_ATTEMPTS} attempts to run an agent's episodes"
            raise RuntimeError(why)
        everything = gather_episodes(found, request, self._world)
        return [everything[place] for place in sorted(everything)]

    async def _run_all(
        self, turns: TurnEngine, request: GenerationRequest, places: Sequence[int]
    ) -> dict[int, Episode]:
        """Run this rank's episodes; those that a lost server has spoiled are left out.

        Raises:
            StepInterrupted: a stop of the run is due.
        """
        found, queue = dict[int, Episode](), self._queue
        free = asyncio.Semaphore(self._config.max_concurrent)

        async def run(place: int) -> None:
            prompt, sample = request.sample_at(place)
            async with free:
                episode = await self._run(prompt, sample, request.sampling)
            if not queue.lost.is_set():
                found[place] = episode
                if request.on_response is not None:
                    request.on_response([place], [episode])

        if not self._endpoint.url:
            await self._endpoint.start()
        await self._program.start()
        queue.begin(turns, request.sampling, request.seed)
        tasks = [asyncio.create_task(run(place)) for place in places]
        try:
            await _wait(tasks, queue.lost)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await queue.end()
        return found

    async def _run(self, prompt: Prompt, sample: int, sampling: SamplingConfig) -> Episode:
        """Run an episode to its end."""
        ids, sessions = prompt.token_ids.tolist(), self._sessions
        session = sessions.open(opening_of(prompt), token_ids=ids, sampling=sampling)
        self._queue.name(session.id, prompt.uid, sample)
        access, limit_s = (
            EpisodeAccess(session.base_url, session.anthropic_url, session.key),
            self._config.max_seconds,
        )
        result = failed("it was cancelled")
        try:
            work = self._program.run(access, task_of(prompt))
            result = await asyncio.wait_for(work, limit_s)
        except asyncio.TimeoutError:
            result = failed(f"it took longer than rollout.agent.max_seconds, {limit_s:g} s")
        finally:
            where = f"the agent of {describe(prompt)}: "
            error = None if result.error is None else where + result.error
            record = await sessions.close(session.id, error)
        tick()
        return _episode(prompt, record, result)

    def submit(self, request: GenerationRequest) -> LocalGeneration:
        """See ``RolloutEngine.submit``; runs the episodes before it returns."""
        start = time.perf_counter()
        found = self.generate(request)
        seconds = time.perf_counter() - start
        return LocalGeneration(request, found, seconds, self._world)

    def turns(self) -> TurnEngine:
        """See ``RolloutEngine.turns``."""
        return self._engine.turns()

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """See ``RolloutEngine.update_weights``."""
        self._engine.update_weights(buckets, version)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See ``RolloutEngine.logprobs``."""
        return self._engine.logprobs(sequences)

    def sync_metrics(self) -> dict[str, float]:
        """See ``RolloutEngine.sync_metrics``."""
        return self._engine.sync_metrics()

    def sleep(self) -> None:
        """See ``RolloutEngine.sleep``."""
        self._engine.sleep()

    def stop(self) -> None:
        """Stop the engine, and every process of the agent."""
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._program.stop())
            self._loop.run_until_complete(self._endpoint.stop())
            self._loop.close()
        self._engine.stop()


async def _wait(tasks: Sequence[asyncio.Task[None]], lost: asyncio.Event) -> None:
    """Wait until all tasks are done, or a server is lost.

    Raises:
        StepInterrupted: a stop of the run is due.
    """
    left = set(tasks)
    while left and not lost.is_set():
        stop_request.raise_if_due()
        tick()  # each episode has its own limit
        done, left = await asyncio.wait(left, timeout=_POLL_S)
        for task in done:
            task.result()  # raises what is no failure of an agent


def _episode(prompt: Prompt, record: EpisodeRecord, result: EpisodeResult) -> Episode:
    """An episode of one sequence for each leaf of its session's tree."""
    error, reward = record.error, result.reward if result.reward is not None else record.reward
    if record.is_used_up and error is not None:
        # its limits end an episode as a response's longest length does: that is no failure
        error, reward = None, 0.0 if reward is None else reward
    if not record.leaves and error is None:
        error = f"the agent of {describe(prompt)}: it asked the policy nothing"
    said = EpisodeResult(reward, {**record.numbers, **result.numbers}, error)
    if not record.leaves:
        nothing = EpisodeTokens(torch.empty(0), torch.empty(0))
        return replace(Episode.sampled(prompt, nothing, "stop", 0), result=said)
    sequences = []
    for leaf in record.leaves:
        context, tokens = leaf.context_ids, EpisodeTokens(leaf.ids, leaf.logprobs)
        same = torch.equal(context, prompt.token_ids)
        own = prompt if same else replace(prompt, token_ids=context)
        sequences.append(Episode(own, leaf.parts, leaf.finish_reason, tokens=tokens))
    *earlier, last = sequences
    reason = "length" if record.is_used_up else last.finish_reason
    return replace(last, finish_reason=reason, earlier=tuple(earlier), result=said)

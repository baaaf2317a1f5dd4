"""Episodes of agents that talk to the policy over an endpoint, each at its own pace.

Every rank starts the agents of its own episodes, and answers their requests with its part of the
rollout engine, all at the same time, in a thread of its own. A slow agent delays no other one.
While the weights change, and while a colocated engine sleeps, requests wait: an agent notices
nothing but time. What a batch does not take goes on (``rollout.max_staleness``) or ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from mppo.agents.endpoint.session import Limits
from mppo.agents.endpoint.sessions import EpisodeRecord, Sessions
from mppo.agents.endpoint.tool_calls import tool_parser
from mppo.agents.episode_program import Program, failed, opening_of
from mppo.agents.event_loop import EventLoop
from mppo.agents.running_episodes import EpisodeKey, EpisodeStart, RunningEpisodes, use_metrics
from mppo.agents.turn_queue import Drawing, TurnQueue
from mppo.batch.episode import Episode, EpisodeResult, EpisodesBySample, EpisodeTokens
from mppo.batch.prompt import Prompt
from mppo.parallel.collectives import all_gather_objects, raise_on_any_rank, wait_for_ranks
from mppo.recipe.sections.agent import AgentConfig
from mppo.rewards.response import describe
from mppo.rollout.engine import EngineAround, GenerationRequest, RolloutEngine
from mppo.rollout.response_gather import AnsweredPrompts, complete_prompts, gather_episodes
from mppo.rollout.turns import TurnEngine
from mppo.safety.input_error import InputError
from mppo.supervision import stop_request
from mppo.supervision.phase import tick
from mppo.supervision.stop_request import StepInterrupted
from mppo.weights.bucket import WeightBucket

if TYPE_CHECKING:
    from mppo.agents.endpoint.server import Endpoint

_ATTEMPTS = 3
_POLL_S = 0.05
_ABORT_S = 5.0
"""An aborted request is answered within this time, or its server hangs."""


class EpisodeEngine(EngineAround):
    """A rollout engine whose responses are episodes of a program; a ``RolloutEngine``.

    Args:
        engine: generates the turns of the policy.
        program: runs the episodes.
        tokens: most tokens of a sequence, everything before it included.
        goes_on: whether episodes that a batch does not take go on.

    Attributes:
        run: runs a coroutine in the loop of the episodes, see ``EventLoop.run``.
        version: of the weights.
        kept, passing: episodes to train on, and others, as in validation.
        homes: the rank of each episode that goes on, on every rank.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        program: Program,
        tokenizer: PreTrainedTokenizerBase,
        config: AgentConfig,
        tokens: int,
        *,
        goes_on: bool = False,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        super().__init__(engine)
        self._program, self._config = program, config
        self.goes_on, self.rank, self.world = goes_on, rank, world
        self.queue = TurnQueue()
        limits = Limits(context_tokens=tokens, turns=config.max_turns)
        parse = tool_parser(config.tool_format)
        self._sessions = Sessions(tokenizer, self.queue, limits, parse_tools=parse)
        self._endpoint: Endpoint | None = None
        if config.uses_endpoint:
            from mppo.agents.endpoint.server import Endpoint  # needs a web server

            self._endpoint = Endpoint(self._sessions)
        self._loop = EventLoop()
        self.run, self.version = self._loop.run, 0
        at_once = config.most_at_once
        self.kept = RunningEpisodes(self._run_episode, at_once)
        self.passing = RunningEpisodes(self._run_episode, at_once)
        self.homes: dict[EpisodeKey, int] = {}
        self._metrics: dict[str, float] = {}

    def generate(self, request: GenerationRequest) -> list[Episode]:
        """See ``RolloutEngine.generate``; episodes that go on do so during it. RuntimeError on
        every rank if an episode could not be run in several attempts."""
        was_open = self.queue.is_open
        found = EpisodeGeneration(self, request, is_training=False).collect()
        if was_open:
            self.open()
        return found

    def submit(self, request: GenerationRequest) -> EpisodeGeneration:
        return EpisodeGeneration(self, request, is_training=True)

    def open(self) -> TurnEngine:
        """Answer the agents' requests from now on; collective."""
        turns = self._engine.turns()
        self.run(self._open(turns))
        return turns

    async def _open(self, turns: TurnEngine) -> None:
        if self._endpoint is not None and not self._endpoint.url:
            await self._endpoint.start()
        await self._program.start()
        if self.queue.is_lost:  # an agent may notice only later that its request failed
            for running in (self.kept, self.passing):
                await running.end_unfinished()
        self.queue.open(turns)

    def pause(self) -> None:
        """Let the agents' requests wait; returns once no rank generates. Collective."""
        if self._loop.is_running:
            self.run(self.queue.pause())
        wait_for_ranks(self.world)  # a batch of turns may take longer than any time limit

    async def _run_episode(self, start: EpisodeStart) -> Episode | None:
        """Run an episode to its end; None if a lost server has spoiled it."""
        prompt, sessions, queue = start.prompt, self._sessions, self.queue
        ids, sampling = prompt.token_ids.tolist(), start.drawing.sampling
        session = sessions.open(opening_of(prompt), token_ids=ids, sampling=sampling)
        queue.name(session.id, prompt.uid, start.sample, start.drawing)
        result = failed("it was cancelled")
        try:
            result = await self._within_limit(self._program.run(session, prompt))
        finally:
            where = f"the agent of {describe(prompt)}: "
            error = None if result.error is None else where + result.error
            record = await sessions.close(session.id, error)
            use = queue.forget(session.id)
        tick()
        return None if queue.is_lost else _episode(prompt, record, replace(result, use=use))

    async def _within_limit(self, work: Coroutine[None, None, EpisodeResult]) -> EpisodeResult:
        """The result of an episode, which may take ``max_seconds`` while its turns are answered."""
        limit_s, queue = self._config.max_seconds, self.queue
        task, until_s = asyncio.ensure_future(work), queue.open_seconds + limit_s
        try:
            while not task.done():
                left_s = until_s - queue.open_seconds
                if left_s <= 0:
                    return failed(f"it took longer than rollout.agent.max_seconds, {limit_s:g} s")
                await asyncio.wait([task], timeout=max(left_s, _POLL_S))
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        self.pause()
        super().update_weights(buckets, version)
        self.version = version

    def add_up(self, episodes: Sequence[Episode]) -> None:
        """Take a batch's metrics from this rank's episodes in it; collective."""
        uses = [each.result.use for each in episodes if each.result and each.result.use]
        everyone = all_gather_objects(uses, self.world)
        self._metrics = use_metrics([use for part in everyone for use in part])

    def sync_metrics(self) -> dict[str, float]:
        """See ``RolloutEngine.sync_metrics``; also what the episodes of the last batch took."""
        return super().sync_metrics() | self._metrics

    def sleep(self) -> None:
        self.pause()
        super().sleep()

    def stop(self) -> None:
        try:
            if self._loop.is_running:
                self.run(self._stop())
                self._loop.stop()
        finally:
            super().stop()

    async def _stop(self) -> None:
        with suppress(asyncio.TimeoutError):  # a server that hangs holds up no end
            await asyncio.wait_for(self.queue.pause(), _ABORT_S)
        for running in (self.kept, self.passing):
            await running.run_only({})
        await self._program.stop()
        await (self._sessions.end_all() if self._endpoint is None else self._endpoint.stop())


class EpisodeGeneration:
    """See ``rollout.engine.Generation``. The constructor starts the episodes; collective.

    Episodes that a checkpoint would have to keep run in processes of others: it keeps none, and a
    resumed run starts them again.
    """

    def __init__(
        self, engine: EpisodeEngine, request: GenerationRequest, *, is_training: bool
    ) -> None:
        self._engine, self._request, self._is_training = engine, request, is_training
        self._running = engine.kept if is_training else engine.passing
        self._goes_on = engine.goes_on and is_training
        self._homes = engine.homes if self._goes_on else {}
        self._started_at = time.perf_counter()
        self.seconds = 0.0
        self.left_over: EpisodesBySample = {}
        self._begin()

    def _begin(self) -> None:
        """Start the episodes that do not run; collective."""
        request, engine, homes = self._request, self._engine, self._homes
        n, turns = request.sampling.n, engine.open()
        self._answered = AnsweredPrompts(request)
        new = [prompt for prompt in request.prompts if (prompt.uid, 0) not in homes]
        dealt = turns.homes(new, n)
        for place, rank in dealt.items():
            homes[new[place // n].uid, place % n] = rank
        keys = [self._key(place) for place in range(len(request.prompts) * n)]
        for key in homes.keys() - set(keys):
            del homes[key]
        self._places = {key: place for place, key in enumerate(keys) if homes[key] == engine.rank}
        drawing = Drawing(request.sampling, request.seed)
        starts = {
            key: EpisodeStart(*request.sample_at(place), drawing, engine.version)
            for key, place in self._places.items()
        }
        engine.run(self._start(starts))

    def _key(self, place: int) -> EpisodeKey:
        prompt, sample = self._request.sample_at(place)
        return prompt.uid, sample

    async def _start(self, starts: Mapping[EpisodeKey, EpisodeStart]) -> None:
        self._running.on_done = self._ended
        await self._running.run_only(starts, self._request.oldest_version)
        self._answered.add([self._places[key] for key in starts if key in self._running.done])

    def _ended(self, key: EpisodeKey, episode: Episode) -> None:
        self._answered.add([self._places[key]])
        if self._request.on_response is not None:
            self._request.on_response([self._places[key]], [episode])

    def wait(self) -> None:
        self._engine.pause()
        self.seconds = time.perf_counter() - self._started_at

    def collect(self) -> list[Episode]:
        engine, request, running = self._engine, self._request, self._running
        for _ in range(_ATTEMPTS):
            error = None
            try:
                engine.run(self._until_enough(), may_interrupt=True)
            except StepInterrupted:
                pass  # raised again below, on all ranks at the same point
            except Exception as failure:
                kind = "" if isinstance(failure, InputError) else f"{type(failure).__name__}: "
                error = f"rank {engine.rank}: the agent's episodes: {kind}{failure}"
            engine.pause()
            stop_request.sync()
            raise_on_any_rank(error, engine.world)
            self._answered.close()
            lacking = engine.queue.is_lost or running.lacks(self._places)
            if not any(all_gather_objects(lacking, engine.world)):
                break
            self._begin()  # lost servers start again, and the episodes that they have spoiled
        else:
            why = f"the servers were lost in {_ATTEMPTS} attempts to run an agent's episodes"
            raise RuntimeError(why)
        self.seconds = time.perf_counter() - self._started_at
        found = {place: running.done[k] for k, place in self._places.items() if k in running.done}
        everything, n = gather_episodes(found, request, engine.world), request.sampling.n
        taken = complete_prompts(everything, request)[: request.num_prompts_needed]
        places = [prompt * n + sample for prompt in taken for sample in range(n)]
        if self._is_training:
            engine.add_up([found[place] for place in places if place in found])
        gone = [self._key(place) for place in places] if self._goes_on else list(self._homes)
        engine.run(running.end([key for key in gone if key in self._places]))
        for key in gone:
            del self._homes[key]
        return [everything[place] for place in places]

    async def _until_enough(self) -> None:
        """Wait until the result is there, or a server is lost; raise an error of mppo or the
        engine."""
        running, needed = self._running, self._request.num_prompts_needed
        while needed is not None or not running.done.keys() >= self._places.keys():
            if running.failure is not None:
                self._answered.give_up()
                raise running.failure
            if self._engine.queue.is_lost or running.lacks(self._places):
                self._answered.give_up()
                return
            if self._answered.are_enough:
                return
            await asyncio.sleep(_POLL_S)


def _episode(prompt: Prompt, record: EpisodeRecord, result: EpisodeResult) -> Episode:
    """An episode of one sequence for each leaf of its session's tree."""
    error, reward = record.error, result.reward if result.reward is not None else record.reward
    if record.is_used_up and error is not None:
        # a limit ends an episode without failure, as the longest length ends a response
        error, reward = None, 0.0 if reward is None else reward
    if not record.leaves and error is None:
        error = f"the agent of {describe(prompt)}: it asked the policy nothing"
    numbers = {**record.numbers, **result.numbers}
    said = EpisodeResult(reward, numbers, error, result.messages or record.messages, result.use)
    if not record.leaves:
        nothing = EpisodeTokens(torch.empty(0), torch.empty(0))
        return replace(Episode.sampled(prompt, nothing, "stop", 0), result=said)
    sequences = []
    for leaf in record.leaves:
        context, tokens = leaf.context_ids, EpisodeTokens(leaf.ids, leaf.logprobs, leaf.experts)
        same = torch.equal(context, prompt.token_ids)
        own = prompt if same else replace(prompt, token_ids=context)
        found = leaf.parts, leaf.finish_reason, 0, tokens.routed, tokens
        sequences.append(Episode(own, *found))
    *earlier, last = sequences
    reason = "length" if record.is_used_up else last.finish_reason
    return replace(last, finish_reason=reason, earlier=tuple(earlier), result=said)

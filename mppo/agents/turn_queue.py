"""Turns that sessions ask for, given to the rank's engine in threads and batches."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from mppo.batch.episode import EpisodeUse
from mppo.recipe.sections.rollout import SamplingConfig
from mppo.rollout.turns import EngineLost, Turn, TurnEngine, TurnRequest
from mppo.supervision.phase import tick

_GATHER_S = 0.004
"""Seconds for which the first text of a batch waits for others."""
_ABORT_S = 0.05
"""Seconds between two aborts: a request may reach a server just after it has aborted all others."""
_TURNS = 1 << 20
"""Most samples of a prompt: the random streams of a session's turns are this far apart."""


@dataclass(frozen=True)
class Drawing:
    """How an episode's turns are drawn; ``seed``: of the local engine's random streams."""

    sampling: SamplingConfig
    seed: int


@dataclass(eq=False)
class _Session:
    """A session: the number of its next random stream, and its requests that wait."""

    uid: int
    stream: int
    drawing: Drawing
    began_s: float
    use: EpisodeUse = field(default_factory=EpisodeUse)
    waiting: int = 0
    waits_since_s: float = 0.0


@dataclass(frozen=True, eq=False)
class _Waiting:
    request: TurnRequest
    drawing: Drawing
    future: asyncio.Future[Turn]


class TurnQueue:
    """A ``Generator`` for the sessions of this rank. It generates while it is open; between
    ``pause`` and ``open`` sessions wait. All calls come from one event loop.

    Attributes:
        is_lost: whether no server is left.
    """

    def __init__(self) -> None:
        self._engine: TurnEngine | None = None
        self._waiting: deque[_Waiting] = deque()
        self._threads: ThreadPoolExecutor | None = None
        self._calls = 0
        self._running = 0
        self._starts = False
        self._sessions: dict[str, _Session] = {}
        self._opened_at, self._open_s = 0.0, 0.0
        self.is_lost = False

    @property
    def is_open(self) -> bool:
        return self._engine is not None

    @property
    def open_seconds(self) -> float:
        """For how long it has been open: only this time counts for an agent."""
        return self._open_s + (time.monotonic() - self._opened_at if self.is_open else 0.0)

    def open(self, engine: TurnEngine) -> None:
        """Generate with this part of the engine, of the rank, from now on."""
        if self.is_open:
            self._open_s = self.open_seconds
        if self._threads is None or self._calls < engine.calls:
            self._calls = engine.calls
            self._threads = ThreadPoolExecutor(engine.calls, thread_name_prefix="turns")
        self._engine, self._opened_at, self.is_lost = engine, time.monotonic(), False
        self._start_soon()

    async def pause(self) -> None:
        """Interrupt the turns that are being generated; their sessions ask for the rest."""
        engine, self._open_s = self._engine, self.open_seconds
        self._engine = None
        while engine is not None and self._running:
            await asyncio.to_thread(engine.abort)
            await asyncio.sleep(_ABORT_S)

    def name(self, session: str, uid: int, sample: int, drawing: Drawing) -> None:
        self._sessions[session] = _Session(uid, sample, drawing, self.open_seconds)

    def forget(self, session: str) -> EpisodeUse:
        """Forget a session that has ended; return what it took."""
        found = self._sessions.pop(session)
        found.use.seconds = self.open_seconds - found.began_s
        return found.use

    async def generate(self, token_ids: Sequence[int], max_tokens: int, session: str) -> Turn:
        asks = self._sessions[session]
        ids = torch.tensor(token_ids, dtype=torch.int32)
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        request = TurnRequest(ids, max_tokens, (asks.uid, asks.stream), session)
        asks.stream += _TURNS  # each turn has its own numbers
        self._waiting.append(_Waiting(request, asks.drawing, future))
        self._start_soon()
        if not asks.waiting:
            asks.waits_since_s = self.open_seconds
        asks.waiting += 1
        try:
            turn = await future
        finally:
            asks.waiting -= 1
            if not asks.waiting:
                asks.use.generation_s += self.open_seconds - asks.waits_since_s
        asks.use.context_tokens += len(token_ids)
        if turn.cached is not None:
            asks.use.cached_tokens = (asks.use.cached_tokens or 0) + turn.cached
        return turn

    def _start_soon(self) -> None:
        if not self._starts and self._engine is not None:
            self._starts = True
            wait_s = _GATHER_S if self._engine.at_once > 1 else 0.0
            asyncio.get_running_loop().call_later(wait_s, self._start)

    def _start(self) -> None:
        """Give texts that wait to free threads."""
        self._starts, engine = False, self._engine
        while engine is not None and self._waiting and self._running < engine.calls:
            if batch := self._next_batch(engine.at_once):
                self._running += 1
                task = asyncio.ensure_future(self._generate(engine, batch))
                task.add_done_callback(lambda _: self._start_soon())

    def _next_batch(self, most: int) -> list[_Waiting]:
        """The first texts that wait and are drawn alike."""
        batch: list[_Waiting] = []
        others: list[_Waiting] = []
        while self._waiting and len(batch) < most:
            waiting = self._waiting.popleft()
            if waiting.future.done():  # its client has gone
                continue
            alike = not batch or waiting.drawing == batch[0].drawing
            (batch if alike else others).append(waiting)
        self._waiting.extendleft(reversed(others))
        return batch

    async def _generate(self, engine: TurnEngine, batch: Sequence[_Waiting]) -> None:
        requests, drawing = [each.request for each in batch], batch[0].drawing
        loop = asyncio.get_running_loop()
        call = engine.generate, requests, drawing.sampling, drawing.seed
        try:
            turns = await loop.run_in_executor(self._threads, *call)
        except Exception as error:  # each session says what happened to its request
            self.is_lost = self.is_lost or isinstance(error, EngineLost)
            for each in batch:
                if not each.future.done():
                    each.future.set_exception(error)
            return
        finally:
            self._running -= 1
        tick()
        for each, turn in zip(batch, turns, strict=True):
            if not each.future.done():
                each.future.set_result(turn)

"""Turns that sessions ask for, given to the rank's engine in threads and batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from mppo.config.sections.rollout import SamplingConfig
from mppo.rollout.turns import EngineLost, Turn, TurnEngine, TurnRequest
from mppo.supervision.phase import tick

_GATHER_S = 0.004
"""Seconds for which the first text of a batch waits for others."""
_TURNS = 1 << 20
"""Most samples of a prompt: the random streams of a session's turns are this far apart."""
_Waiting = tuple[TurnRequest, "asyncio.Future[Turn]"]


class TurnQueue:
    """A ``Generator`` for the sessions of this rank; it generates between ``begin`` and ``end``.

    Attributes:
        lost: set once no server is left.
    """

    def __init__(self) -> None:
        self._engine: TurnEngine | None = None
        self._sampling, self._seed = SamplingConfig(), 0
        self._waiting: deque[_Waiting] = deque()
        self._threads: ThreadPoolExecutor | None = None
        self._running = 0
        self._starts = False
        self._streams: dict[str, tuple[int, int]] = {}
        self.lost = asyncio.Event()

    def begin(self, engine: TurnEngine, sampling: SamplingConfig, seed: int) -> None:
        """Generate with this part of the engine from now on.

        Args:
            engine: of the rank.
            sampling: of all turns.
            seed: of the local engine's random streams.
        """
        self._engine, self._sampling, self._seed = engine, sampling, seed
        self._threads = ThreadPoolExecutor(engine.calls, thread_name_prefix="turns")
        self.lost.clear()

    def name(self, session: str, uid: int, sample: int) -> None:
        """Say which episode a session is."""
        self._streams[session] = uid, sample

    async def generate(self, token_ids: Sequence[int], max_tokens: int, session: str) -> Turn:
        """See ``Generator``."""
        assert self._engine is not None, "sessions are open between begin and end only"
        uid, stream = self._streams[session]
        self._streams[session] = uid, stream + _TURNS  # each turn has numbers of its own
        ids = torch.tensor(token_ids, dtype=torch.int32)
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._waiting.append((TurnRequest(ids, max_tokens, (uid, stream), session), future))
        self._start_soon()
        return await future

    async def end(self) -> None:
        """Abort what is still being generated, and wait for its end."""
        engine, threads = self._engine, self._threads
        assert engine is not None, "it has begun"
        assert threads is not None, "it has begun"
        for _, future in self._waiting:
            future.cancel()
        self._waiting.clear()
        if self._running:
            await asyncio.to_thread(engine.abort)
        while self._running:
            await asyncio.sleep(_GATHER_S)
        threads.shutdown()
        self._engine = self._threads = None
        self._streams.clear()

    def _start_soon(self) -> None:
        if not self._starts and self._engine is not None:
            self._starts = True
            wait_s = _GATHER_S if self._engine.at_once > 1 else 0.0
            asyncio.get_running_loop().call_later(wait_s, self._start)

    def _start(self) -> None:
        """Give texts that wait to free threads."""
        self._starts, engine = False, self._engine
        while engine is not None and self._waiting and self._running < engine.calls:
            batch: list[_Waiting] = []
            while self._waiting and len(batch) < engine.at_once:
                waiting = self._waiting.popleft()
                if not waiting[1].done():  # its client may have gone
                    batch.append(waiting)
            if batch:
                self._running += 1
                task = asyncio.ensure_future(self._generate(engine, batch))
                task.add_done_callback(lambda _: self._start_soon())

    async def _generate(self, engine: TurnEngine, batch: Sequence[_Waiting]) -> None:
        requests = [request for request, _ in batch]
        loop = asyncio.get_running_loop()
        call = engine.generate, requests, self._sampling, self._seed
        try:
            turns = await loop.run_in_executor(self._threads, *call)
        except Exception as error:  # each session says what happened to its request
            if isinstance(error, EngineLost):
                self.lost.set()
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        finally:
            self._running -= 1
        tick()
        for (_, future), turn in zip(batch, turns, strict=True):
            if not future.done():
                future.set_result(turn)

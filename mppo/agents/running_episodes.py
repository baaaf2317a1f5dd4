"""The episodes that run on a rank, from their start until a batch takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from mppo.agents.turn_queue import Drawing
from mppo.batch.episode import Episode, EpisodeUse
from mppo.batch.prompt import Prompt

EpisodeKey = tuple[int, int]
"""The uid of an episode's prompt and the number of the sample."""


@dataclass(frozen=True)
class EpisodeStart:
    """What an episode starts from; ``version``: of the weights at its start."""

    prompt: Prompt
    sample: int
    drawing: Drawing
    version: int


class RunningEpisodes:
    """Episodes by key; all calls come from one event loop.

    Args:
        run: runs an episode; returns None if its server was lost.
        most: episodes at the same time.

    Attributes:
        on_done: gets each episode when it ends.
        done: episodes that have ended.
        failure: the first exception of mppo or the engine; an agent's own is in its episode.
    """

    def __init__(self, run: Callable[[EpisodeStart], Awaitable[Episode | None]], most: int) -> None:
        self._run, self._free = run, asyncio.Semaphore(most)
        self._tasks: dict[EpisodeKey, asyncio.Task[None]] = {}
        self._versions: dict[EpisodeKey, int] = {}
        self.on_done: Callable[[EpisodeKey, Episode], None] = lambda key, episode: None
        self.done: dict[EpisodeKey, Episode] = {}
        self.failure: Exception | None = None

    def lacks(self, keys: Collection[EpisodeKey]) -> bool:
        """Whether an episode neither runs nor has ended."""
        return any(key not in self._tasks and key not in self.done for key in keys)

    async def run_only(
        self, wanted: Mapping[EpisodeKey, EpisodeStart], oldest_version: int = 0
    ) -> None:
        """Let the wanted episodes run or stay, start those that are new, and end all others; those
        that began with weights older than ``oldest_version`` start again."""
        old = {key for key, version in self._versions.items() if version < oldest_version}
        await self.end([key for key in self._versions if key in old or key not in wanted])
        for key, start in wanted.items():
            if self.lacks([key]):
                self._versions[key] = start.version
                self._tasks[key] = asyncio.create_task(self._one(key, start))

    async def end(self, keys: Collection[EpisodeKey]) -> None:
        tasks = [self._tasks.pop(key) for key in keys if key in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for key in keys:
            self.done.pop(key, None)
            self._versions.pop(key, None)

    async def end_unfinished(self) -> None:
        """End the episodes that still run; those that are wanted start again."""
        await self.end(list(self._tasks))

    async def _one(self, key: EpisodeKey, start: EpisodeStart) -> None:
        try:
            async with self._free:
                episode = await self._run(start)
            if episode is not None:
                self.done[key] = episode
                self.on_done(key, episode)
        except Exception as error:  # raised by the engine, on all ranks
            self.failure = self.failure or error
        finally:
            # one that has started again under this key has a task of its own
            if self._tasks.get(key) is asyncio.current_task():
                del self._tasks[key]


def use_metrics(uses: Sequence[EpisodeUse]) -> dict[str, float]:
    """``conversation/agent_s/*`` and ``conversation/generation_s/*`` of episodes, and
    ``conversation/prefix_hit_rate`` of all their requests, if the engine has a prefix cache."""
    metrics: dict[str, float] = {}
    found = {
        "agent_s": [use.seconds - use.generation_s for use in uses],
        "generation_s": [use.generation_s for use in uses],
    }
    for name, values in found.items():
        if values:
            mean = sum(values) / len(values)
            for kind, value in (("mean", mean), ("max", max(values)), ("min", min(values))):
                metrics[f"conversation/{name}/{kind}"] = value
    known = [use for use in uses if use.cached_tokens is not None]
    if context := sum(use.context_tokens for use in known):
        cached = sum(use.cached_tokens or 0 for use in known)
        metrics["conversation/prefix_hit_rate"] = cached / context
    return metrics

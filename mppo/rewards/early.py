"""Scoring of finished responses while others are still being generated."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from mppo.batch.episode import Episode
from mppo.batch.score import ResponseScore
from mppo.rewards.division import exchange_scores
from mppo.rewards.scorer import Scorer

_FORGOTTEN = -1


class EarlyScores:
    """Scores responses on the rank that received them, in a thread, during generation; the reward
    function gets them in parts, in the order in which they finish."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._parts: list[tuple[list[int], Future[list[ResponseScore]]]] = []
        self._known: dict[int, ResponseScore] = {}
        # one thread: a reward function need not be thread-safe
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="scoring")

    def take(self, keys: Sequence[int], episodes: Sequence[Episode]) -> None:
        """Start to score finished responses; returns at once, any thread may call it. ``finish``
        finds the scores by ``keys``, one per episode."""
        scores = self._pool.submit(self._scorer.raw_scores, episodes)
        self._parts.append((list(keys), scores))

    def forget(self, keys: Collection[int]) -> None:
        """Drop the scores of responses that are generated again; if possible they are not made."""
        gone = {*keys, _FORGOTTEN}
        for part in list(self._parts):
            names, scores = part
            names[:] = [_FORGOTTEN if key in gone else key for key in names]
            if gone.issuperset(names):
                scores.cancel()
                self._parts.remove(part)
        self._known = {key: each for key, each in self._known.items() if key not in gone}

    def drop(self) -> None:
        """End the thread, after the part that it scores."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def finish(self, keys: Sequence[int], episodes: Sequence[Episode]) -> list[ResponseScore]:
        """Return what ``Scorer.score`` returns, and score now what was not taken early. Collective;
        ScoringError if scoring failed on some rank."""
        by_key = dict(zip(keys, episodes, strict=True))
        failure: Exception | None = None
        try:
            for part in list(self._parts):
                names, scores = part
                if not by_key.keys().isdisjoint(names):
                    self._parts.remove(part)
                    self._known.update(zip(names, scores.result(), strict=True))
        except Exception as error:  # raised after the exchange, in which the other ranks wait
            failure = error
        mine = {key: self._known.pop(key) for key in keys if key in self._known}
        known = exchange_scores(mine, by_key, failure)
        late = [index for index, key in enumerate(keys) if key not in known]
        scores = self._scorer.raw_scores_divided([episodes[index] for index in late])
        known.update(zip([keys[index] for index in late], scores, strict=True))
        return self._scorer.finish_scores([known[key] for key in keys], episodes)

"""Scoring of finished responses while others are still being generated."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from mppo.batch.episode import Episode
from mppo.batch.score import ResponseScore
from mppo.rewards.division import exchange_scores
from mppo.rewards.scorer import Scorer


class EarlyScores:
    """Scores responses on the rank that received them, in a thread, during generation.

    The reward function gets the responses in parts, in the order in which they finish.

    Args:
        scorer: calls the reward function, and applies clip and penalties.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._parts: list[tuple[tuple[int, ...], Future[list[ResponseScore]]]] = []
        # one thread: a reward function need not be thread-safe
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="scoring")

    def take(self, keys: Sequence[int], episodes: Sequence[Episode]) -> None:
        """Start to score finished responses; returns at once, any thread may call it.

        Args:
            keys: one per episode; ``finish`` finds the scores by them.
            episodes: the responses.
        """
        scores = self._pool.submit(self._scorer.raw_scores, episodes)
        self._parts.append((tuple(keys), scores))

    def drop(self) -> None:
        """Cancel the parts that have not started yet."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def finish(self, keys: Sequence[int], episodes: Sequence[Episode]) -> list[ResponseScore]:
        """Return what ``Scorer.score`` returns; score now what was not taken early. Collective.

        Args:
            keys: one per response; scores under other keys are dropped.
            episodes: the responses.

        Raises:
            ScoringError: scoring failed on some rank.
        """
        mine: dict[int, ResponseScore] = {}
        failure: Exception | None = None
        try:
            for taken, scores in self._parts:
                mine.update(zip(taken, scores.result(), strict=True))
        except Exception as error:  # raised after the exchange, in which the other ranks wait
            failure = error
        self.drop()
        by_key = dict(zip(keys, episodes, strict=True))
        known = exchange_scores(mine, by_key, failure)
        late = [index for index, key in enumerate(keys) if key not in known]
        scores = self._scorer.raw_scores_divided([episodes[index] for index in late])
        known.update(zip([keys[index] for index in late], scores, strict=True))
        return self._scorer.finish_scores([known[key] for key in keys], episodes)

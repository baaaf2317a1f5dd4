"""Scoring of finished responses while others are still being generated."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from mppo.batch import Trajectory
from mppo.rewards.division import exchange_results
from mppo.rewards.judgement import Judgement
from mppo.rewards.scorer import Scorer


class EarlyScores:
    """Judges responses on the rank that received them, in a thread beside generation.

    A judge sees the responses in parts, as they come.

    Args:
        scorer: judges and shapes.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._parts: list[tuple[tuple[int, ...], Future[list[Judgement]]]] = []
        # one thread: judges need not be safe for several
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="scoring")

    def take(self, keys: Sequence[int], trajectories: Sequence[Trajectory]) -> None:
        """Have finished responses judged; returns at once, any thread may call it.

        Args:
            keys: by which ``finish`` will know them.
            trajectories: the responses.
        """
        self._parts.append((tuple(keys), self._pool.submit(self._scorer.judged, trajectories)))

    def drop(self) -> None:
        """Judge nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def finish(self, keys: Sequence[int], trajectories: Sequence[Trajectory]) -> list[Judgement]:
        """As ``Scorer.score``; what was not taken early is judged now. Collective.

        Args:
            keys: one for each trajectory; whatever else was taken is forgotten.
            trajectories: the same on every rank.

        Raises:
            ScoringError: judging failed on some rank.
        """
        mine: dict[int, Judgement] = {}
        failure: Exception | None = None
        try:
            for taken, judged in self._parts:
                mine.update(zip(taken, judged.result(), strict=True))
        except Exception as error:  # told to the other ranks first, or they would wait for this one
            failure = error
        self.drop()
        known = {
            key: each for part in exchange_results(mine, failure) for key, each in part.items()
        }
        late = {key: t for key, t in zip(keys, trajectories, strict=True) if key not in known}
        known.update(zip(late, self._scorer.judged_by_all(list(late.values()))))
        return self._scorer.shaped([known[key] for key in keys], trajectories)

"""The engine of a replay: it has no weights and generates nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mppo.batch.episode import Episode
from mppo.rollout.engine import Generation, GenerationRequest
from mppo.rollout.turns import TurnEngine
from mppo.weights.bucket import WeightBucket


class NoEngine:
    """Stands for an engine where responses come from a dump (``trainer.replay``)."""

    def submit(self, request: GenerationRequest) -> Generation:
        raise RuntimeError("a replay (trainer.replay) has no engine to generate with")

    def generate(self, request: GenerationRequest) -> list[Episode]:
        raise RuntimeError("a replay (trainer.replay) has no engine to generate with")

    def turns(self) -> TurnEngine:
        raise RuntimeError("a replay (trainer.replay) has no engine to generate with")

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        raise RuntimeError("a replay (trainer.replay) has no engine to compute with")

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """Take no weights: no rank iterates the stream."""

    def sync_metrics(self) -> dict[str, float]:
        return {}

    def sleep(self) -> None:
        """Nothing to release."""

    def stop(self) -> None:
        """Nothing to stop."""

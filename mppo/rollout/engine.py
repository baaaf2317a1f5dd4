"""The protocol of rollout engines, and the values they exchange with the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from mppo.batch.episode import NO_WEIGHTS, Episode, EpisodesBySample
from mppo.batch.prompt import Prompt
from mppo.recipe.sections.rollout import SamplingConfig
from mppo.rollout.turns import TurnEngine
from mppo.weights.bucket import WeightBucket
from mppo.weights.slices.slice_plan import SliceRequest
from mppo.weights.slices.slice_source import SliceStream

OnResponse = Callable[[Sequence[int], Sequence[Episode]], None]
"""Called with finished responses while others are still being generated, on the rank that received
them, from any thread. Arguments: their indices in the result (``prompt * n + sample``), and the
responses."""


@dataclass(frozen=True)
class GenerationRequest:
    """``sampling.n`` responses to each of some prompts.

    Args:
        prompts: P prompts, the same on every rank.
        sampling: sampling parameters; ``temperature`` 0 is greedy.
        max_tokens: most generated tokens of a response.
        seed: the same prompts, seed and weights give the same tokens (local engine).
        on_response: called early with some or all responses, at most once for each; must not block.
        num_prompts_needed: once this many prompts have all their samples, the remaining requests
            are aborted. None: all prompts.
        among: only this many prompts, the first ones, may be in the result; the others are
            generated for a later request. None: all.
        resumable: complete or partial responses of an earlier request.
        oldest_version: responses with tokens of older weights are not resumed.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingConfig
    max_tokens: int
    seed: int
    on_response: OnResponse | None = None
    num_prompts_needed: int | None = None
    among: int | None = None
    resumable: EpisodesBySample = field(default_factory=dict)
    oldest_version: int = 0

    @property
    def choice(self) -> int:
        """Number of prompts that may be in the result; they come first."""
        return len(self.prompts) if self.among is None else self.among

    def sample_at(self, place: int) -> tuple[Prompt, int]:
        """The prompt and the sample number at an index of the result."""
        index, sample = divmod(place, self.sampling.n)
        return self.prompts[index], sample

    def resumed(self) -> dict[int, Episode]:
        """The resumable responses by their index in the result, at their homes. A resumed run may
        have other prompts or a shorter limit: entries that no longer match are ignored."""
        found: dict[int, Episode] = {}
        for place in range(len(self.prompts) * self.sampling.n):
            prompt, sample = self.sample_at(place)
            episode = self.resumable.get((prompt.uid, sample))
            if episode is None or not torch.equal(episode.prompt.token_ids, prompt.token_ids):
                continue
            if any(NO_WEIGHTS < version < self.oldest_version for version, _ in episode.parts):
                continue
            if episode.length + episode.is_unfinished <= self.max_tokens:
                found[place] = replace(episode, prompt=prompt)
        return found


def sampling_seed(seed: int, step: int) -> int:
    """Sampling seed of a PPO step, different every step; of step 0, validation, always the same."""
    return seed * 1_000_003 + step


class WeightSource:
    """A weight stream that can be repeated for a server that was restarted, unlike a generator.

    Args:
        make: starts a new stream of the current weights; collective.
        slices: the same weights as slices for the ranks of an engine, planned once; collective.
            None: whole tensors only.
        reading: context in which the weights are read. A stream enters it when it starts and leaves
            it at its end; whoever uses ``slices`` enters it for their stream.
    """

    def __init__(
        self,
        make: Callable[[], Iterable[WeightBucket]],
        slices: Callable[[SliceRequest], SliceStream] | None = None,
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._make, self.slices, self.reading = make, slices, reading

    def __iter__(self) -> Iterator[WeightBucket]:
        with self.reading():
            yield from self._make()


class Generation(Protocol):
    @property
    def seconds(self) -> float: ...

    @property
    def left_over(self) -> EpisodesBySample:
        """Responses that were not collected, at their homes, for a later request to resume; valid
        once ``wait`` or ``collect`` has returned."""
        ...

    def wait(self) -> None:
        """Return when no request is in flight, so that weights may be updated. Collective. If a
        stop of the run was requested, the requests are aborted; nothing is raised."""
        ...

    def collect(self) -> list[Episode]:
        """See ``RolloutEngine.generate``. Collective; call it once. Responses that were lost with a
        server before ``wait`` are generated again, with the servers' current weights."""
        ...


class RolloutEngine(Protocol):
    """Generates episodes with a copy of the actor's weights.

    Every method is collective: all ranks call it with the same arguments.
    """

    def submit(self, request: GenerationRequest) -> Generation:
        """Start generation. Any later call, ``update_weights`` in particular, first waits for this
        one, so no response mixes two weight versions without recording it."""
        ...

    def generate(self, request: GenerationRequest) -> list[Episode]:
        """Generate and wait: P * n responses (or ``num_prompts_needed * n``), prompt by prompt.
        Every rank knows all of them; the tokens of each lie on the rank that received it."""
        ...

    def turns(self) -> TurnEngine:
        """This rank's part of the engine, ready to generate until the next collective call."""
        ...

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """Load new weights, also after ``sleep``. Every rank drains ``buckets`` (producing them is
        collective); an engine can repeat a ``WeightSource`` if a server loses its weights."""
        ...

    def sync_metrics(self) -> dict[str, float]:
        """Bytes of the last weight update, if the engine counts them."""
        ...

    def sleep(self) -> None:
        """Release device memory for training."""
        ...

    def stop(self) -> None:
        """Stop every process that the engine started. Idempotent."""
        ...


class EngineAround:
    """What an engine around another one leaves to it; see ``RolloutEngine``."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def turns(self) -> TurnEngine:
        return self._engine.turns()

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        self._engine.update_weights(buckets, version)

    def sync_metrics(self) -> dict[str, float]:
        return self._engine.sync_metrics()

    def sleep(self) -> None:
        self._engine.sleep()

    def stop(self) -> None:
        self._engine.stop()

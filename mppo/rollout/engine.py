"""What every rollout engine does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from mppo.batch import Begun, Prompt, Trajectory
from mppo.config.schema import SamplingConfig
from mppo.weights.slices import SliceRequest, SliceStream

WeightBucket = list[tuple[str, Tensor]]
"""Hugging Face names with whole tensors, on the training device."""


Finished = Callable[[Sequence[int], Sequence[Trajectory]], None]
"""Told of finished responses while others are still being generated: their places in the result
(``prompt * n + sample``) and the responses, on the rank that received them, from any thread."""


@dataclass(frozen=True)
class Wish:
    """What an engine is asked for: ``sampling.n`` responses to each prompt.

    Args:
        prompts: P prompts, the same on every rank.
        sampling: how to draw; ``temperature`` 0 is greedy.
        max_tokens: length stop, in generated tokens.
        seed: same prompts, seed and weights give the same tokens (local engine).
        finished: told of some or all responses early, of none twice; never waits for others.
        wanted: this many prompts with all their samples are enough; what is not answered by then
            is aborted. None: all.
        begun: what is known of the responses and so not generated again. The engine leaves there
            what it knows and has not handed out. By default nothing.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingConfig
    max_tokens: int
    seed: int
    finished: Finished | None = None
    wanted: int | None = None
    begun: Begun = field(default_factory=dict)

    def sample_at(self, place: int) -> tuple[Prompt, int]:
        """The prompt, and which of its samples, that has a place in the result."""
        index, sample = divmod(place, self.sampling.n)
        return self.prompts[index], sample

    def known(self) -> dict[int, Trajectory]:
        """What has begun of the result, by place.

        A resumed run may have other prompts than the one before, or wish for shorter responses:
        what does not fit does not count.
        """
        found = {}
        for place in range(len(self.prompts) * self.sampling.n):
            prompt, sample = self.sample_at(place)
            response = self.begun.get((prompt.uid, sample))
            if response is None or response.prompt.token_ids != prompt.token_ids:
                continue
            least = len(response.response_ids) + (response.finish_reason == "abort")
            if least <= self.max_tokens:
                found[place] = replace(response, prompt=prompt)
        return found

    def keep(self, found: Mapping[int, Trajectory], taken: Collection[int] = ()) -> None:
        """Leave in ``begun`` what was found, by place, of prompts that are not ``taken``, and
        nothing else."""
        self.begun.clear()
        for place, response in found.items():
            index, sample = divmod(place, self.sampling.n)
            if index not in taken and response.response_ids:
                self.begun[self.prompts[index].uid, sample] = response


class WeightSource:
    """A stream of weights that can be produced again, unlike a generator.

    An engine whose server died takes the weights again from it.

    Args:
        make: starts a fresh stream of the current weights; collective.
        slices: the same weights as pieces for the ranks of an engine, planned once; collective.
            None: whole tensors only.
    """

    def __init__(
        self,
        make: Callable[[], Iterable[WeightBucket]],
        slices: Callable[[SliceRequest], SliceStream] | None = None,
    ) -> None:
        self._make, self.slices = make, slices

    def __iter__(self) -> Iterator[WeightBucket]:
        return iter(self._make())


class Generation(Protocol):
    """Responses on their way."""

    @property
    def seconds(self) -> float:
        """How long this rank's requests were under way."""
        ...

    def settle(self) -> None:
        """Wait until no request is under way: new weights may come. Collective.

        Nothing is raised for a run that is asked to stop; its requests are aborted.
        """
        ...

    def result(self) -> list[Trajectory]:
        """See ``RolloutEngine.generate``. Collective, once.

        What servers lost before ``settle`` is generated now, with the weights they then have.
        """
        ...


class RolloutEngine(Protocol):
    """A generator of trajectories whose weights follow the actor's.

    Every method is collective: all ranks call it, with the same arguments.
    """

    def begin(self, wish: Wish) -> Generation:
        """Start to do what ``generate`` does.

        Whatever else the engine is then asked, new weights above all, first settles what is under
        way, so that no response is drawn from two models unawares.
        """
        ...

    def generate(self, wish: Wish) -> list[Trajectory]:
        """Sample the responses that are wished for.

        Returns:
            P * n trajectories on every rank (or ``wanted * n``), prompt by prompt.
        """
        ...

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """Take new weights. Every rank drains ``buckets`` (producing them is collective).

        A ``WeightSource`` lets an engine ask for them again, should it lose them.
        """
        ...

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of every token but the first, by the engine's own weights at
        temperature 1: the check that engine and actor hold the same model."""
        ...

    def sync_metrics(self) -> dict[str, float]:
        """Bytes of the last update of the weights, where the engine counts them."""
        ...

    def sleep(self) -> None:
        """Give the device's memory to training."""
        ...

    def wake(self) -> None:
        """Take the memory back, ready to receive weights."""
        ...

    def stop(self) -> None:
        """End every process the engine owns. Idempotent."""
        ...

"""What every rollout engine does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from mppo.batch import Prompt, ResponsesBySample, Trajectory
from mppo.config.sections.rollout import SamplingConfig
from mppo.weights.slices.source import SliceRequest, SliceStream

WeightBucket = list[tuple[str, Tensor]]
"""Hugging Face names with whole tensors, on the training device."""


OnResponse = Callable[[Sequence[int], Sequence[Trajectory]], None]
"""Called with finished responses while others are still being generated: their places in the result
(``prompt * n + sample``) and the responses, on the rank that received them, from any thread."""


@dataclass(frozen=True)
class GenerationRequest:
    """``sampling.n`` responses to each of some prompts.

    Args:
        prompts: P prompts, the same on every rank.
        sampling: how to draw; ``temperature`` 0 is greedy.
        max_tokens: length stop, in generated tokens.
        seed: same prompts, seed and weights give the same tokens (local engine).
        on_response: called with some or all responses early, with none twice; must not block.
        num_prompts_needed: this many prompts with all their samples are enough; the rest is
            aborted then. None: all.
        resumable: responses, whole or in part, that need not be generated again.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingConfig
    max_tokens: int
    seed: int
    on_response: OnResponse | None = None
    num_prompts_needed: int | None = None
    resumable: Mapping[tuple[int, int], Trajectory] = field(default_factory=dict)

    def sample_at(self, place: int) -> tuple[Prompt, int]:
        """The prompt, and which of its samples, that has a place in the result."""
        index, sample = divmod(place, self.sampling.n)
        return self.prompts[index], sample

    def resumed(self) -> dict[int, Trajectory]:
        """The resumable responses by their place in the result.

        A resumed run may have other prompts than the run before, or a shorter limit: entries that
        no longer match are ignored.
        """
        found = {}
        for place in range(len(self.prompts) * self.sampling.n):
            prompt, sample = self.sample_at(place)
            response = self.resumable.get((prompt.uid, sample))
            if response is None or response.prompt.token_ids != prompt.token_ids:
                continue
            least = len(response.response_ids) + (response.finish_reason == "abort")
            if least <= self.max_tokens:
                found[place] = replace(response, prompt=prompt)
        return found

    def left_over(
        self, found: Mapping[int, Trajectory], taken: Collection[int] = ()
    ) -> ResponsesBySample:
        """Responses that are there and not part of the result.

        Args:
            found: by place; an empty response is not worth keeping.
            taken: prompts (by index) whose responses are the result.
        """
        left = {}
        for place, response in found.items():
            index, sample = divmod(place, self.sampling.n)
            if index not in taken and response.response_ids:
                left[self.prompts[index].uid, sample] = response
        return left


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
    """Responses that are being generated."""

    @property
    def seconds(self) -> float:
        """How long this rank's requests took."""
        ...

    @property
    def left_over(self) -> ResponsesBySample:
        """Responses that are there and were not collected, for a later request to resume.

        Valid once ``wait`` or ``collect`` has returned.
        """
        ...

    def wait(self) -> None:
        """Return when no request is under way: new weights may come. Collective.

        Nothing is raised for a run that is asked to stop; its requests are aborted.
        """
        ...

    def collect(self) -> list[Trajectory]:
        """See ``RolloutEngine.generate``. Collective, once.

        Responses that servers lost before ``wait`` are generated now, with the weights the servers
        then have.
        """
        ...


class RolloutEngine(Protocol):
    """A generator of trajectories whose weights follow the actor's.

    Every method is collective: all ranks call it, with the same arguments.
    """

    def submit(self, request: GenerationRequest) -> Generation:
        """Start to generate.

        Any later call, ``update_weights`` in particular, first waits for this one, so no response
        mixes two weight versions without saying so.
        """
        ...

    def generate(self, request: GenerationRequest) -> list[Trajectory]:
        """Generate and wait for the result.

        Returns:
            P * n trajectories on every rank (or ``num_prompts_needed * n``), prompt by prompt.
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

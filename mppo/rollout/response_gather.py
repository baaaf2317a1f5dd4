"""What all ranks know of the responses that each received: all but their tokens, in one exchange of
flat tensors, and before that how many prompts have all their samples, without a collective call.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from mppo.batch.episode import Episode, EpisodesBySample
from mppo.batch.prompt import Prompt
from mppo.parallel.collectives import all_gather_varlen
from mppo.rollout.engine import GenerationRequest
from mppo.safety.input_error import InputError

_REASONS = ("stop", "length", "abort")
_NO_EXPERTS = (-1, -1, -1)
_NUMBERS = count(1)
"""Each count has a key of its own in the store, the same on every rank."""
_OF_REQUEST = -1
"""Stands for the number of a prompt's tokens where they are those of the request's prompt."""


def gather_episodes(
    mine: Mapping[int, Episode], request: GenerationRequest, world: int
) -> dict[int, Episode]:
    """The episodes that all ranks received, by index in the result of the request: this rank's with
    tokens, those of others without. Collective; InputError on every rank if a log-probability is
    not finite."""
    everyone = all_gather_varlen(_table(mine, request), world)
    found: dict[int, Episode] = {}
    for home, table in enumerate(everyone):
        found.update(_read_table(table, request, home))
    return {key: mine[key].moved(each.home) if key in mine else each for key, each in found.items()}


def _table(mine: Mapping[int, Episode], request: GenerationRequest) -> Tensor:
    """A rank's episodes without tokens, int64: the first log-probability that is not finite
    (whether there is one, key, version, bits); then for each episode its key, its number of
    sequences, and for each sequence what ``_sequence`` says."""
    numbers = [0, 0, 0, 0]
    for key, episode in mine.items():
        numbers += [key, len(episode.sequences)]
        for sequence in episode.sequences:
            logprobs = sequence.here.logprobs
            finite = logprobs.isfinite()
            if not numbers[0] and not bool(finite.all()):
                bits = logprobs[~finite][:1].view(torch.int32).item()
                numbers[:4] = [1, key, sequence.parts[-1][0], int(bits)]
            numbers += _sequence(sequence, request.sample_at(key)[0])
    return torch.tensor(numbers, dtype=torch.int64)


def _sequence(sequence: Episode, prompt: Prompt) -> list[int]:
    """A sequence without tokens: number of tokens before it, finish reason, shape of the experts,
    number of parts, and its parts."""
    own = torch.equal(sequence.prompt.token_ids, prompt.token_ids)
    before = _OF_REQUEST if own else len(sequence.prompt.token_ids)
    shape, parts = sequence.routed or _NO_EXPERTS, sequence.parts
    reason = _REASONS.index(sequence.finish_reason)
    return [before, reason, *shape, len(parts), *(number for part in parts for number in part)]


def _read_table(table: Tensor, request: GenerationRequest, home: int) -> dict[int, Episode]:
    """What a rank knows of its episodes, by index; InputError if a log-probability is not
    finite."""
    numbers = iter(table.tolist())
    spoiled, key, version, bits = islice(numbers, 4)
    if spoiled:
        raise InputError(_not_finite(request.sample_at(key)[0], version, bits))
    found: dict[int, Episode] = {}
    for key in numbers:
        prompt, count = request.sample_at(key)[0], next(numbers)
        *earlier, last = [_read_sequence(numbers, prompt, home) for _ in range(count)]
        found[key] = replace(last, earlier=tuple(earlier))
    return found


def _read_sequence(numbers: Iterator[int], prompt: Prompt, home: int) -> Episode:
    """The inverse of ``_sequence``; unknown tokens before the sequence are zeros."""
    before, reason, *shape, count = islice(numbers, 6)
    parts = tuple((next(numbers), next(numbers)) for _ in range(count))
    routed = None if tuple(shape) == _NO_EXPERTS else (shape[0], shape[1], shape[2])
    if before != _OF_REQUEST:
        prompt = replace(prompt, token_ids=torch.zeros(before, dtype=torch.int32))
    return Episode(prompt, parts, _REASONS[reason], home, routed)


def _not_finite(prompt: Prompt, version: int, bits: int) -> str:
    value = torch.tensor(bits, dtype=torch.int32).view(torch.float32).item()
    return (
        f"rollout: log-probability {value} in the response to prompt {prompt.uid}: the weights of "
        f"version {version} hold NaN or overflow (look at actor/grad_norm and "
        "lower actor.optim.lr, or use model.dtype = bfloat16 or float32)"
    )


def gather_logprobs(
    mine: Tensor, orders: Sequence[Sequence[int]], lengths: Sequence[int]
) -> list[list[float]]:
    """Log-probabilities of all sequences, which have one for every token but the first.

    ``mine``: those that this rank computed, end to end; ``orders``: the sequences of each rank, in
    order; ``lengths``: of all sequences. Collective.
    """
    found: list[list[float]] = [[] for _ in lengths]
    for order, flat in zip(orders, all_gather_varlen(mine, len(orders)), strict=True):
        values = iter(flat.tolist())
        for index in order:
            found[index] = list(islice(values, max(0, lengths[index] - 1)))
    return found


def complete_prompts(episodes: Mapping[int, Episode], request: GenerationRequest) -> list[int]:
    """Prompts that may be in the result and whose samples are all finished, in order."""
    n = request.sampling.n
    done = {key for key, each in episodes.items() if not each.is_unfinished}
    return [p for p in range(request.choice) if done.issuperset(range(p * n, p * n + n))]


def left_over(
    request: GenerationRequest, episodes: Mapping[int, Episode], taken: Collection[int] = ()
) -> EpisodesBySample:
    """The episodes that are not part of the result, without empty ones, at their homes; ``taken``
    prompts (by index) are the result."""
    n = request.sampling.n
    found: dict[tuple[int, int], Episode] = {}
    for place, episode in episodes.items():
        if place // n not in taken and episode.length:
            prompt, sample = request.sample_at(place)
            found[prompt.uid, sample] = episode
    return found


class AnsweredPrompts:
    """Counts the prompts of a request that may be in its result; all methods from any thread.

    With ``num_prompts_needed`` None nothing is counted. The constructor is collective: all ranks
    make the same counts in the same order.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._needed, self._n = request.num_prompts_needed, request.sampling.n
        self._places, self._name = request.choice * self._n, f"mppo/answered/{next(_NUMBERS)}"
        self._counted: set[int] = set()
        self._samples: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._complete_here = 0
        self._store: Any = None
        if self._needed is not None and dist.is_initialized() and dist.get_world_size() > 1:
            self._store = distributed_c10d._get_default_store()

    def add(self, places: Sequence[int]) -> None:
        """Count finished responses, given as ``prompt * n + sample``, each once."""
        if self._needed is None:
            return
        with self._lock:
            new = {place for place in places if place < self._places} - self._counted
            self._counted |= new
            prompts = [place // self._n for place in new]
            self._samples.update(prompts)
            complete = sum(self._samples[prompt] == self._n for prompt in set(prompts))
            self._complete_here += complete
        if self._store is not None:
            # the store's atomic counter needs no collective call: ranks finish at different times
            self._store.add(self._name, complete)

    def give_up(self) -> None:
        """Let no rank wait any longer for prompts of this one."""
        if self._store is not None and self._needed is not None:
            self._store.add(self._name, self._needed)

    @property
    def are_enough(self) -> bool:
        """Whether the result is complete, on all ranks together."""
        if self._needed is None:
            return False
        here = self._complete_here
        total = here if self._store is None else self._store.add(self._name, 0)
        return total >= self._needed

    def close(self) -> None:
        """Remove the count from the store, after the last rank has read it."""
        if self._store is not None and dist.get_rank() == 0:
            self._store.delete_key(self._name)

"""What all ranks know of the responses that each received, as one exchange of flat tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from mppo.batch.episode import Episode, EpisodesBySample
from mppo.batch.prompt import Prompt
from mppo.parallel.collectives import all_gather_varlen
from mppo.rollout.engine import GenerationRequest
from mppo.safety.input_error import InputError

_REASONS = ("stop", "length", "abort")
_NO_EXPERTS = (-1, -1, -1)
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

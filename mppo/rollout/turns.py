"""Turns of the policy, one by one, on one rank: what conversations at their own pace need. Between
two collective calls each rank may continue texts on its own, in any number and order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mppo.batch.prompt import Prompt
from mppo.parallel.partition import partition
from mppo.recipe.sections.rollout import SamplingConfig


@dataclass(frozen=True, eq=False)
class TurnRequest:
    """A text to continue: everything before the turn, int32 ``[N]``. Requests of one ``session``
    share prefixes; the local engine generates the same tokens for the same text, numbers of the
    random ``stream`` and seed."""

    token_ids: Tensor
    max_tokens: int
    stream: tuple[int, int]
    session: str


@dataclass(frozen=True, eq=False)
class Turn:
    """What the engine generated for one request.

    Args:
        ids: int32 ``[N]``, the stop token included when one was generated.
        logprobs: float32 ``[N]``, see ``mppo.batch.episode.EpisodeTokens``.
        finish_reason: "stop", "length", or "abort": the engine was interrupted, for example by an
            update of its weights, and is asked for the rest.
        cached: tokens before the turn that lay in the engine's prefix cache; None: it has none.
        experts: int16 ``[tokens, layers, k]``, of all tokens of the text and the turn but the last,
            -1: unknown; None: the engine does not report them.
    """

    ids: Tensor
    logprobs: Tensor
    finish_reason: str
    version: int
    cached: int | None = None
    experts: Tensor | None = None


class EngineLost(RuntimeError):
    """No server of this rank is left to continue a text."""


def deal_prompts(prompts: Sequence[Prompt], n: int, ranks: Sequence[int]) -> dict[int, int]:
    """The rank of each sample, by index (``prompt * n + sample``); one for all samples of a prompt.
    Each entry of ``ranks``, in which a rank may stand several times, gets an equal number of
    prompts, of nearly equal length in all."""
    parts = partition([len(prompt.token_ids) for prompt in prompts], len(ranks), equal_count=True)
    return {
        index * n + sample: rank
        for rank, part in zip(ranks, parts, strict=True)
        for index in part
        for sample in range(n)
    }


class TurnEngine(Protocol):
    """A rank's part of a rollout engine, between two collective calls: ``calls`` at the same time,
    each of ``at_once`` requests."""

    at_once: int
    calls: int

    def homes(self, prompts: Sequence[Prompt], n: int) -> dict[int, int]:
        """The rank that runs each episode, by index (``prompt * n + sample``); one for all samples
        of a prompt, where ``AnsweredPrompts`` counts them."""
        ...

    def generate(
        self, requests: Sequence[TurnRequest], sampling: SamplingConfig, seed: int
    ) -> list[Turn]:
        """Continue texts, from any thread; EngineLost if every server of this rank failed."""
        ...

    def abort(self) -> None:
        """Abort what is being generated, if the engine can: its turns are no longer wanted."""
        ...

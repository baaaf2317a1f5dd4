"""Episodes: what the policy answered to a prompt, and what an environment said between its turns.

Every rank knows of each episode all but its tokens, which lie on one rank, its home.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mppo.batch.prompt import ComparedByValue, Prompt
from mppo.batch.score import ResponseScore

NO_WEIGHTS = -1
"""The weight version of tokens that no weights generated: prompts, and an environment's tokens."""

Key = TypeVar("Key")
Part = tuple[int, int]
"""Version of the weights that generated some tokens, and their number."""


@dataclass
class EpisodeUse:
    """What an episode took: seconds in which its requests were answered, of these those in which at
    least one request waited; tokens before its turns, in all requests, of these those in the
    engine's prefix cache (None: it has none)."""

    seconds: float = 0.0
    generation_s: float = 0.0
    context_tokens: int = 0
    cached_tokens: int | None = None


@dataclass(frozen=True)
class EpisodeResult:
    """What an agent says of a conversation that has ended.

    Args:
        reward: the score; None: the reward function scores the conversation.
        numbers: further numbers by name, which are logged.
        error: why the agent failed; None: it did not.
        messages: the conversation, for a reward model that reads it in its own chat template; of
            several histories the last one.
    """

    reward: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    use: EpisodeUse | None = field(default=None, compare=False)


@dataclass(frozen=True, eq=False)
class EpisodeTokens(ComparedByValue):
    """The tokens of an episode after its prompt.

    Args:
        ids: int32 ``[L]`` (any sequence is converted, as of ``logprobs``), generated tokens, the
            stop token included when one was generated, and an environment's tokens between them.
        logprobs: float32 ``[L]``, log-probability of each token under the distribution it was
            sampled from, before top-p/top-k/min-p truncation: softmax(logits / temperature); 0 for
            an environment's tokens.
        experts: int16 ``[tokens, layers, k]``, experts chosen by the engine's routers for the first
            tokens of prompt and response (the last generated token is never routed); None if the
            engine does not report them.
    """

    ids: Tensor
    logprobs: Tensor
    experts: Tensor | None = None

    def __post_init__(self) -> None:
        self._convert("ids", torch.int32)
        self._convert("logprobs", torch.float32)

    @property
    def routed(self) -> tuple[int, int, int] | None:
        if self.experts is None:
            return None
        tokens, layers, chosen = self.experts.shape
        return tokens, layers, chosen


@dataclass(frozen=True, eq=False)
class Episode(ComparedByValue):
    """One sampled response. In a conversation, an environment's tokens are parts of it.

    An agent may leave the history of its episode: it summarises it, asks another agent, or changes
    what was said. What the policy generated before is then a sequence of its own in ``earlier``.
    Each token that the policy generated is in one sequence.

    Args:
        prompt: the prompt; its tokens are all that precede the response.
        parts: of its tokens, in order; the version of an environment's part is ``NO_WEIGHTS``.
        finish_reason: "stop" (a stop token was generated), "length" or "abort".
        home: the rank that holds its tokens.
        routed: shape of its experts, (tokens, layers, k); None: the engine reports none.
        tokens: on its home; None elsewhere.
        result: what the agent says of the conversation, on the rank that ran the agent.
        score: of the response; None: not scored yet.
        earlier: the sequences that the episode left, in order. They have neither results nor
            scores of their own.
    """

    prompt: Prompt
    parts: tuple[Part, ...]
    finish_reason: str
    home: int = 0
    routed: tuple[int, int, int] | None = None
    tokens: EpisodeTokens | None = None
    result: EpisodeResult | None = None
    score: ResponseScore | None = None
    earlier: tuple[Episode, ...] = ()

    @classmethod
    def sampled(
        cls,
        prompt: Prompt,
        tokens: EpisodeTokens,
        finish_reason: str,
        version: int,
        earlier: tuple[Part, ...] = (),
    ) -> Episode:
        """An episode whose tokens this rank has received; ``version`` is of the weights that
        generated the tokens after the earlier parts."""
        last = len(tokens.ids) - sum(count for _, count in earlier)
        parts = (*earlier, (version, last))
        return cls(prompt, parts, finish_reason, 0, tokens.routed, tokens)

    @property
    def here(self) -> EpisodeTokens:
        """The tokens, on the rank that holds them."""
        assert self.tokens is not None, f"the tokens lie on rank {self.home}"
        return self.tokens

    @property
    def scored(self) -> ResponseScore:
        assert self.score is not None, "score the episode first"
        return self.score

    @property
    def sequences(self) -> tuple[Episode, ...]:
        """The sequences to train on; the last one is this response."""
        return *self.earlier, self

    @property
    def length(self) -> int:
        return sum(count for _, count in self.parts)

    @property
    def inserted(self) -> int:
        """Number of the environment's tokens among them."""
        return sum(count for version, count in self.parts if version == NO_WEIGHTS)

    @property
    def turns(self) -> int:
        return 1 + sum(version == NO_WEIGHTS for version, _ in self.parts)

    @property
    def is_unfinished(self) -> bool:
        return self.finish_reason == "abort"

    def moved(self, home: int) -> Episode:
        earlier = tuple(each.moved(home) for each in self.earlier)
        return replace(self, home=home, earlier=earlier)

    def elsewhere(self, home: int) -> Episode:
        """What the other ranks know of an episode whose home is ``home``."""
        earlier = tuple(each.elsewhere(home) for each in self.earlier)
        return replace(self, home=home, tokens=None, result=None, earlier=earlier)

    def with_experts(self, experts: Tensor) -> Episode:
        tokens = replace(self.here, experts=experts)
        return replace(self, tokens=tokens, routed=tokens.routed)

    def followed_by(self, more: Episode) -> Episode:
        """This episode with the tokens of a continuation, which ends it or a part of it."""
        before, after = self.here, more.here
        tokens = EpisodeTokens(
            torch.cat([before.ids, after.ids]),
            torch.cat([before.logprobs, after.logprobs]),
            after.experts,
        )
        return replace(more, parts=(*self.parts, *more.parts), tokens=tokens)


EpisodesBySample = Mapping[tuple[int, int], Episode]
"""Episodes by prompt uid and sample number."""


def with_scores(episodes: Sequence[Episode], scores: Sequence[ResponseScore]) -> list[Episode]:
    return [replace(each, score=score) for each, score in zip(episodes, scores, strict=True)]


def held(episodes: Mapping[Key, Episode]) -> dict[Key, Episode]:
    """Those whose tokens this rank holds."""
    return {key: each for key, each in episodes.items() if each.tokens is not None}

"""What the endpoint asks of a rollout engine: a turn of the policy after given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Turn:
    """What the engine generated for one request.

    Args:
        ids: int32 ``[N]``, the stop token included when one was generated.
        logprobs: float32 ``[N]``, see ``mppo.batch.episode.EpisodeTokens``.
        finish_reason: "stop", "length", or "abort": the engine was interrupted, for example by an
            update of its weights, and is asked for the rest.
        version: of the weights.
    """

    ids: Tensor
    logprobs: Tensor
    finish_reason: str
    version: int


class Generator(Protocol):
    """A rollout engine, as the endpoint uses it."""

    async def generate(self, token_ids: Sequence[int], max_tokens: int, session: str) -> Turn:
        """Generate what follows some tokens. A cancelled call is aborted in the engine.

        Args:
            token_ids: everything before the turn.
            max_tokens: most tokens to generate, at least 1.
            session: requests of one session share prefixes.
        """
        ...

"""What the endpoint asks of a rollout engine: a turn of the policy after given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mppo.rollout.turns import Turn


class Generator(Protocol):
    async def generate(self, token_ids: Sequence[int], max_tokens: int, session: str) -> Turn:
        """Generate what follows all tokens before the turn, at most ``max_tokens`` (at least 1);
        requests of one session share prefixes. A cancelled call is aborted in the engine."""
        ...

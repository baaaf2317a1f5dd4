"""What the endpoint asks of a rollout engine: a turn of the policy after given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mppo.rollout.turns import Turn


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

"""What a judge sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mppo.batch import Prompt


@dataclass(frozen=True)
class Response:
    """A decoded response and the prompt it answers."""

    prompt: Prompt
    text: str


Judge = Callable[[Sequence[Response]], Sequence[float]]
"""Raw scores, one per response."""

"""What a judge sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mppo.batch import Prompt


@dataclass(frozen=True)
class Response:
    """A decoded response and the prompt it answers."""

    prompt: Prompt
    text: str


RewardFunction = Callable[[Sequence[Response]], Sequence[Any]]
"""A result per response, as ``mppo.rewards.result`` reads it, a ``JudgingError`` or
``Unscored`` (``mppo.rewards.judgement``)."""


def describe(prompt: Prompt) -> str:
    """A prompt, named for a message."""
    return f"prompt {prompt.uid} ({prompt.data_source}: {shorten(prompt.text)!r})"


def shorten(text: str) -> str:
    """At most 80 characters."""
    return text if len(text) <= 80 else text[:77] + "..."

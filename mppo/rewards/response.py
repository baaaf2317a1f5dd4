"""The input of a reward function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mppo.batch import Prompt


@dataclass(frozen=True)
class Response:
    """A decoded response and the prompt it answers.

    Args:
        prompt: the prompt.
        text: the response without special tokens.
        token_ids: all its tokens.
    """

    prompt: Prompt
    text: str
    token_ids: Sequence[int] = ()


RewardFunction = Callable[[Sequence[Response]], Sequence[Any]]
"""Returns one result per response: a value that ``mppo.rewards.result`` reads, a ``FailedScore`` or
an ``Unscored`` (``mppo.rewards.scores``)."""


def describe(prompt: Prompt) -> str:
    """Name a prompt in a message."""
    return f"prompt {prompt.uid} ({prompt.data_source}: {shorten(prompt.text)!r})"


def shorten(text: str) -> str:
    """Cut a text to 80 characters."""
    return text if len(text) <= 80 else text[:77] + "..."

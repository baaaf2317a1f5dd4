"""The input of a reward function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mppo.batch.episode import EpisodeResult
from mppo.batch.prompt import Prompt


@dataclass(frozen=True)
class Response:
    """A decoded response, without special tokens, and the prompt it answers. ``result``: what an
    agent says of the conversation; None without an agent."""

    prompt: Prompt
    text: str
    token_ids: Sequence[int] = ()
    result: EpisodeResult | None = None


RewardFunction = Callable[[Sequence[Response]], Sequence[Any]]
"""Returns one result per response: a value that ``mppo.rewards.result`` reads, a ``FailedScore`` or
an ``Unscored`` (``mppo.rewards.scores``)."""


def conversation(prompt: Prompt, response: str) -> tuple[Mapping[str, Any], ...]:
    """The prompt's messages (its text as a user's message if it has none) and the response as the
    assistant's."""
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    return (*messages, {"role": "assistant", "content": response})


def describe(prompt: Prompt) -> str:
    return f"prompt {prompt.uid} ({prompt.data_source}: {shorten(prompt.text)!r})"


def shorten(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."

"""Tokens that the policy did not write: a conversation's beginning, or what follows a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mppo.agents.conversation import Message
from mppo.agents.endpoint.refusal import invalid
from mppo.data.chat_template import ChatRenderer
from mppo.hub.tokenizing import tokens_of
from mppo.recipe.errors import ConfigError
from mppo.safety.input_error import InputError

_KEY = "rollout.agent"
Environment = str | Sequence[Mapping[str, Any]]
"""A text, or chat messages."""
_MARK = "turn-of-the-policy"
_ANCHORS = ["\n", "x", "."]
"""Texts behind which a text is tokenised, for tokenizers that put a space before a text."""
_BEFORE = ({"role": "user", "content": "."}, {"role": "assistant", "content": _MARK})


class TurnText:
    """Tokenises what an environment says. The policy's own tokens are never tokenised again."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, renderer: ChatRenderer) -> None:
        self._tokenizer, self._renderer = tokenizer, renderer
        self._anchors = self._usable_anchors()

    def token_ids(self, environment: Environment, last_token: int) -> list[int] | str:
        """The tokens to append to a conversation, or why messages have none: the template fails.

        A text is appended as it is. Messages are rendered with the chat template, from the end of
        the policy's turn to the beginning of its next one. If the policy generated the token that
        ends its turn (``last_token``), that token is left out.

        Raises:
            InputError: messages, and the tokenizer has no chat template, or one that leaves out the
                assistant's messages.
        """
        if isinstance(environment, str):
            return self._ids(environment)
        if not self._tokenizer.chat_template:
            raise InputError(
                "rollout.agent: the agent returned messages, but the tokenizer has no chat "
                "template; return a text, or use a tokenizer with a chat template"
            )
        try:
            text = self._renderer.render([*_BEFORE, *environment])
        except ConfigError as error:
            why = "; ".join(issue.why for issue in error.issues)
            return f"its messages cannot be rendered: {why}"
        _, mark, after = text.partition(_MARK)
        if not mark:
            why = "leaves out the assistant's messages"
            raise InputError(f"rollout.agent: the tokenizer's chat template {why}")
        ids = self._ids(after)
        return ids[1:] if ids[:1] == [last_token] else ids

    def _ids(self, text: str) -> list[int]:
        """The tokens of a text that follows others.

        SentencePiece's tokenizers put a space before a text. Behind an anchor they do not, and the
        anchor's tokens are cut off; the next anchor is for a text that merges with the first.
        """
        for anchor, head in self._anchors:
            ids = self._encoded([anchor + text])[0]
            if ids[: len(head)] == head:
                return ids[len(head) :]
        return self._encoded([text])[0]

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        return tokens_of(self._tokenizer, texts, special=False)

    def _usable_anchors(self) -> list[tuple[str, list[int]]]:
        """Anchors and their tokens; none for a tokenizer that puts no space before a text."""

        def decode(ids: list[int]) -> str:
            return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

        heads = dict(zip(_ANCHORS, self._encoded(_ANCHORS), strict=True))
        if " " not in decode(heads["x"] * 2):
            return []
        return [(text, ids) for text, ids in heads.items() if decode(ids).strip(" ") == text]


class PromptText:
    """Tokenises in threads: a template or tokenizer may take its time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._renderer = tokenizer, ChatRenderer(tokenizer, _KEY)
        self._turn_text = TurnText(tokenizer, self._renderer)

    def close(self) -> None:
        self._renderer.close()

    @property
    def vocabulary(self) -> int:
        return len(self._tokenizer)

    async def opening(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """The tokens of a conversation up to the beginning of the policy's next turn; Refusal if
        the template refuses the messages."""
        return await asyncio.to_thread(self._opening, messages, tools)

    def _opening(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        try:
            text = self._renderer.render(messages, tools)
            return tokens_of(self._tokenizer, [text], special=False)[0]
        except ConfigError as error:
            raise invalid("; ".join(issue.why for issue in error.issues), "messages") from None

    async def following(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """The tokens of messages after ``last_token`` of a turn of the policy, up to its next one;
        raises as ``opening``."""
        try:
            found = await self.environment(messages, last_token)
        except InputError as error:
            raise invalid(str(error), "messages") from None
        if isinstance(found, str):
            raise invalid(found, "messages")
        return found

    async def environment(self, said: Environment, last_token: int) -> list[int] | str:
        """The tokens of what an environment says after a turn; see ``TurnText.token_ids``."""
        return await asyncio.to_thread(self._turn_text.token_ids, said, last_token)

    async def text(self, text: str) -> list[int]:
        """The tokens of a prompt without a chat template."""
        return (await asyncio.to_thread(tokens_of, self._tokenizer, [text]))[0]

    async def following_text(self, text: str) -> list[int]:
        """The tokens of a text after a turn of the policy."""
        found = await self.environment(text, -1)
        assert not isinstance(found, str), "a text is not rendered"
        return found

    def decode(self, token_ids: Sequence[int], special: bool = False) -> str:
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
            )
        )

"""The tokens of an environment's turn, as they follow the tokens that the policy generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mppo.config.errors import ConfigError
from mppo.data.chat_renderer import ChatRenderer
from mppo.hub.tokenizing import tokens_of
from mppo.safety.input_error import InputError

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

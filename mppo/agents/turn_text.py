"""The tokens of an environment's turn, as they follow the tokens that the policy generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mppo.config.errors import ConfigError
from mppo.data.chat_template import ChatRenderer
from mppo.hub.tokenizing import tokens_of
from mppo.safety.input_error import InputError

Environment = str | Sequence[Mapping[str, Any]]
"""A text, or chat messages."""
_MARK = "turn-of-the-policy"
_ANCHORS = ("\n", "x", ".")
"""Texts behind which a text is tokenised, for tokenizers that put a space before a text."""
_BEFORE = ({"role": "user", "content": "."}, {"role": "assistant", "content": _MARK})


class TurnText:
    """Tokenises what an environment says. The policy's own tokens are never tokenised again.

    Args:
        tokenizer: the policy's.
        renderer: renders messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, renderer: ChatRenderer) -> None:
        self._tokenizer, self._renderer = tokenizer, renderer
        self._anchors = self._usable_anchors()

    def decode(self, turns: Sequence[Sequence[int]]) -> list[str]:
        """The texts of turns, without special tokens."""
        if not turns:
            return []
        return self._tokenizer.batch_decode([list(ids) for ids in turns], skip_special_tokens=True)

    def token_ids(
        self, environments: Sequence[Environment], last_tokens: Sequence[int]
    ) -> list[list[int] | str]:
        """The tokens to append to conversations, or why messages have none: the template fails.

        A text is appended as it is. Messages are rendered with the chat template, from the end of
        the policy's turn to the beginning of its next one. The policy has generated the token that
        ends its turn: it is left out.

        Args:
            environments: of several conversations.
            last_tokens: the last token of the policy's turn in each.

        Raises:
            InputError: messages, and the tokenizer has no chat template, or one that leaves out the
                assistant's messages.
        """
        texts = {i: each for i, each in enumerate(environments) if isinstance(each, str)}
        messages = {i: each for i, each in enumerate(environments) if not isinstance(each, str)}
        failed: dict[int, str] = {}
        conversations = [[*_BEFORE, *each] for each in messages.values()]
        for index, text in zip(messages, self._rendered(conversations), strict=True):
            if isinstance(text, ConfigError):
                why = "; ".join(issue.why for issue in text.issues)
                failed[index] = f"its messages cannot be rendered: {why}"
                continue
            _, mark, after = text.partition(_MARK)
            if not mark:
                why = "leaves out the assistant's messages"
                raise InputError(f"rollout.agent: the tokenizer's chat template {why}")
            texts[index] = after
        ids = dict(zip(texts, self._ids(list(texts.values())), strict=True))
        for index in messages.keys() - failed.keys():
            if ids[index][:1] == [last_tokens[index]]:
                ids[index] = ids[index][1:]
        return [failed[i] if i in failed else ids[i] for i in range(len(environments))]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """The tokens of texts that follow others.

        SentencePiece's tokenizers put a space before a text. Behind an anchor they do not, and the
        anchor's tokens are cut off; the next anchor is for texts that merge with the first.
        """
        found: dict[int, list[int]] = {}
        for anchor, head in self._anchors:
            left = [i for i in range(len(texts)) if i not in found]
            for i, ids in zip(left, self._encoded([anchor + texts[i] for i in left]), strict=True):
                if ids[: len(head)] == head:
                    found[i] = ids[len(head) :]
        left = [i for i in range(len(texts)) if i not in found]
        found |= zip(left, self._encoded([texts[i] for i in left]), strict=True)
        return [found[i] for i in range(len(texts))]

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        return tokens_of(self._tokenizer, texts, special=False) if texts else []

    def _usable_anchors(self) -> list[tuple[str, list[int]]]:
        """Anchors and their tokens; none for a tokenizer that puts no space before a text."""

        def decode(ids: list[int]) -> str:
            return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

        heads = dict(zip(_ANCHORS, self._encoded(list(_ANCHORS)), strict=True))
        if " " not in decode(heads["x"] * 2):
            return []
        return [(text, ids) for text, ids in heads.items() if decode(ids).strip(" ") == text]

    def _rendered(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]]
    ) -> list[str | ConfigError]:
        if not conversations:
            return []
        if not self._tokenizer.chat_template:
            raise InputError(
                "rollout.agent: the agent returned messages, but the tokenizer has no chat "
                "template; return a text, or use a tokenizer with a chat template"
            )
        return self._renderer.render_each(conversations)

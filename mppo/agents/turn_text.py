"""The tokens of an environment's turn, as they follow the tokens that the policy generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mppo.config.errors import ConfigError
from mppo.data.chat_template import render_each

Environment = str | Sequence[Mapping[str, Any]]
"""A text, or chat messages."""
_MARK = "turn-of-the-policy"
_BEFORE = ({"role": "user", "content": "."}, {"role": "assistant", "content": _MARK})


class TurnText:
    """Tokenises what an environment says. The policy's own tokens are never tokenised again.

    Args:
        tokenizer: the policy's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

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
            ValueError: messages, and the tokenizer has no chat template, or one that leaves out the
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
                raise ValueError(f"rollout.agent: the tokenizer's chat template {why}")
            texts[index] = after
        ids = dict(zip(texts, self._ids(list(texts.values())), strict=True))
        for index in messages.keys() - failed.keys():
            if ids[index][:1] == [last_tokens[index]]:
                ids[index] = ids[index][1:]
        return [failed[i] if i in failed else ids[i] for i in range(len(environments))]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    def _rendered(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]]
    ) -> list[str | ConfigError]:
        if not conversations:
            return []
        if not self._tokenizer.chat_template:
            raise ValueError(
                "rollout.agent: the agent returned messages, but the tokenizer has no chat "
                "template; return a text, or use a tokenizer with a chat template"
            )
        return render_each(self._tokenizer, conversations, "rollout.agent")

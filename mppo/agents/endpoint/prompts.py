"""The tokens of what a client says: a conversation's beginning, or what follows a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mppo.agents.conversation import Message
from mppo.agents.endpoint.refusal import invalid
from mppo.agents.turn_text import Environment, TurnText
from mppo.config.errors import ConfigError
from mppo.data.chat_template import ChatRenderer
from mppo.hub.tokenizing import tokens_of
from mppo.safety.input_error import InputError

_KEY = "rollout.agent"


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
        given = said if isinstance(said, str) else list(said)
        return (await asyncio.to_thread(self._turn_text.token_ids, [given], [last_token]))[0]

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
                list(token_ids),
                skip_special_tokens=not special,
                clean_up_tokenization_spaces=False,
            )
        )

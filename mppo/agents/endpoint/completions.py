"""OpenAI's completions: a prompt that is continued without a chat template."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from mppo.agents.endpoint.ask import Ask, Body, Choice, HttpReply, data_events, stop_texts
from mppo.agents.endpoint.chat import token_fields, token_usage
from mppo.agents.endpoint.prompts import PromptText
from mppo.agents.endpoint.refusal import invalid
from mppo.agents.endpoint.session import Session


class CompletionBody(Body):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(default=16, ge=1)
    stop: str | list[str] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    stream_options: dict[str, Any] | None = None

    def ask(self, vocabulary: int) -> Ask:
        """The request, for a vocabulary of so many tokens; Refusal if it asks for what the endpoint
        does not do."""
        for key in ("echo", "suffix"):
            if getattr(self, key):
                raise invalid(f"{key} is not supported: leave it out", key)
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise invalid("give one prompt a request", "prompt")
            prompt = prompt[0]
        if not prompt:
            raise invalid("the prompt is empty", "prompt")
        if not isinstance(prompt, str):
            if not all(0 <= token < vocabulary for token in prompt):
                raise invalid(f"a token id is below 0, or {vocabulary} or more", "prompt")
            prompt = tuple(prompt)
        return Ask(
            prompt=prompt, max_tokens=self.max_tokens, n=self.n or 1, stop=stop_texts(self.stop)
        )


async def answer_completion(session: Session, content: Mapping[str, Any]) -> HttpReply:
    """Answer a request; Refusal if it is invalid, and as of ``Session.answer``."""
    body = CompletionBody.read(content, session.policy.sampling)
    prompts = session.policy.prompts
    answer = await session.answer(body.ask(prompts.vocabulary))
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model or session.policy.model,
    }
    choices = []
    for index, choice in enumerate(answer.choices):
        found = {
            "index": index,
            "text": choice.text,
            "logprobs": None if body.logprobs is None else _logprobs(choice, prompts),
            "finish_reason": choice.finish_reason,
        }
        choices.append(found | (token_fields(answer, choice) if body.return_token_ids else {}))
    usage, events = token_usage(answer), None
    if body.stream:
        asks_usage = (body.stream_options or {}).get("include_usage")
        events = data_events(_chunks(head, choices, usage if asks_usage else None))
    nodes = [choice.node for choice in answer.choices]
    return HttpReply({**head, "choices": choices, "usage": usage}, events, nodes)


def _logprobs(choice: Choice, prompts: PromptText) -> dict[str, Any]:
    turn = choice.node.turn
    tokens = [prompts.decode([token_id], special=True) for token_id in turn.ids.tolist()]
    offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": turn.logprobs.tolist(),
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _chunks(
    head: Mapping[str, Any], choices: list[dict[str, Any]], usage: Mapping[str, int] | None
) -> Iterator[dict[str, Any]]:
    for choice in choices:
        yield {**head, "choices": [choice]}
    if usage is not None:
        yield {**head, "choices": [], "usage": dict(usage)}

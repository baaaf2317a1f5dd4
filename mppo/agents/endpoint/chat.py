"""OpenAI's chat completions, and its completions: a prompt that is continued without a chat
template."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import Field

from mppo.agents.endpoint.ask import (
    Ask,
    Body,
    Choice,
    HttpReply,
    PolicyAnswer,
    data_events,
    stop_texts,
)
from mppo.agents.endpoint.messages import read_messages, read_tools
from mppo.agents.endpoint.prompts import PromptText
from mppo.agents.endpoint.refusal import invalid
from mppo.agents.endpoint.session import Session


class ChatBody(Body):
    messages: list[Any] = Field(min_length=1)
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None

    def ask(self) -> Ask:
        """The request; Refusal if it asks for what the endpoint does not do."""
        if (self.response_format or {}).get("type", "text") != "text":
            raise invalid("answers are not constrained: leave it out", "response_format")
        if self.top_logprobs:
            raise invalid("only the sampled tokens' are known: leave it out", "top_logprobs")
        return Ask(
            messages=read_messages(self.messages),
            tools=offered_tools(self.tools, self.tool_choice),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            n=self.n or 1,
            stop=stop_texts(self.stop),
        )


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


def offered_tools(tools: list[Any] | None, choice: Any) -> tuple[Mapping[str, Any], ...]:
    """The tools that the policy may call; Refusal if a call is demanded, which would need
    constrained sampling."""
    if choice not in (None, "auto", "none"):
        raise invalid("answers are not constrained: use auto or none", "tool_choice")
    return () if choice == "none" else read_tools(tools)


async def answer_chat(session: Session, content: Mapping[str, Any]) -> HttpReply:
    """Answer a request; Refusal if it is invalid, and as of ``Session.answer``."""
    body = ChatBody.read(content, session.policy.sampling)
    answer = await session.answer(body.ask())
    choices = []
    for index, choice in enumerate(answer.choices):
        message = client_message(choice)
        if body.return_token_ids:
            message |= token_fields(answer, choice)
        logprobs = token_logprobs(choice, session.policy.prompts) if body.logprobs else None
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": choice.finish_reason,
            }
        )
    head = _head("chatcmpl", "chat.completion", session, body)
    return _reply(body, answer, head, choices, _chat_chunks)


async def answer_completion(session: Session, content: Mapping[str, Any]) -> HttpReply:
    """As ``answer_chat``, for a completion."""
    body = CompletionBody.read(content, session.policy.sampling)
    prompts = session.policy.prompts
    answer = await session.answer(body.ask(prompts.vocabulary))
    choices = []
    for index, choice in enumerate(answer.choices):
        found = {
            "index": index,
            "text": choice.text,
            "logprobs": None if body.logprobs is None else _completion_logprobs(choice, prompts),
            "finish_reason": choice.finish_reason,
        }
        choices.append(found | (token_fields(answer, choice) if body.return_token_ids else {}))
    head = _head("cmpl", "text_completion", session, body)
    return _reply(body, answer, head, choices, _completion_chunks)


def _head(prefix: str, kind: str, session: Session, body: Body) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": body.model or session.policy.model,
    }


def _reply(
    body: ChatBody | CompletionBody,
    answer: PolicyAnswer,
    head: dict[str, Any],
    choices: list[dict[str, Any]],
    chunks: Callable[..., Iterator[dict[str, Any]]],
) -> HttpReply:
    usage, events = token_usage(answer), None
    if body.stream:
        asks_usage = (body.stream_options or {}).get("include_usage")
        events = data_events(chunks(head, choices, usage if asks_usage else None))
    nodes = [choice.node for choice in answer.choices]
    return HttpReply({**head, "choices": choices, "usage": usage}, events, nodes)


def client_message(choice: Choice) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        found["content"] = choice.text or None
        found["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": arguments_json(call["function"]["arguments"]),
                },
            }
            for call in choice.calls
        ]
    return found


def arguments_json(arguments: Any) -> str:
    """A call's arguments as clients take them: JSON, or what the policy wrote instead."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def token_fields(answer: PolicyAnswer, choice: Choice) -> dict[str, Any]:
    """The tokens themselves, by NeMo-Gym's names."""
    turn = choice.node.turn
    return {
        "prompt_token_ids": list(answer.context),
        "generation_token_ids": turn.ids.tolist(),
        "generation_log_probs": turn.logprobs.tolist(),
    }


def token_usage(answer: PolicyAnswer) -> dict[str, int]:
    before, after = len(answer.context), answer.generated
    return {"prompt_tokens": before, "completion_tokens": after, "total_tokens": before + after}


def token_logprobs(choice: Choice, prompts: PromptText) -> dict[str, Any]:
    turn = choice.node.turn
    content = []
    for token_id, logprob in zip(turn.ids.tolist(), turn.logprobs.tolist(), strict=True):
        text = prompts.decode([token_id], special=True)
        token = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        content.append({**token, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _chat_chunks(
    head: Mapping[str, Any], choices: list[dict[str, Any]], usage: Mapping[str, int] | None
) -> Iterator[dict[str, Any]]:
    head = {**head, "object": "chat.completion.chunk"}
    empty = {} if usage is None else {"usage": None}
    for choice in choices:
        message, index = dict(choice["message"]), choice["index"]
        calls = message.pop("tool_calls", [])
        del message["refusal"]
        deltas = [message]
        deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(calls)]
        for delta in deltas:
            first = {"logprobs": choice["logprobs"]} if delta is message else {}
            part = {"index": index, "delta": delta, "finish_reason": None, **first}
            yield {**head, "choices": [part], **empty}
        last = {"index": index, "delta": {}, "finish_reason": choice["finish_reason"]}
        yield {**head, "choices": [last], **empty}
    if usage is not None:
        yield {**head, "choices": [], "usage": dict(usage)}


def _completion_logprobs(choice: Choice, prompts: PromptText) -> dict[str, Any]:
    turn = choice.node.turn
    tokens = [prompts.decode([token_id], special=True) for token_id in turn.ids.tolist()]
    offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": turn.logprobs.tolist(),
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _completion_chunks(
    head: Mapping[str, Any], choices: list[dict[str, Any]], usage: Mapping[str, int] | None
) -> Iterator[dict[str, Any]]:
    for choice in choices:
        yield {**head, "choices": [choice]}
    if usage is not None:
        yield {**head, "choices": [], "usage": dict(usage)}

"""Anthropic's messages."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from mppo.agents.conversation import Message
from mppo.agents.endpoint.ask import Ask, Body, Choice, HttpReply, named_events, stop_texts
from mppo.agents.endpoint.chat import arguments_json, offered_tools, token_fields
from mppo.agents.endpoint.messages import read_messages, sent_call, text_of
from mppo.agents.endpoint.refusal import invalid
from mppo.agents.endpoint.session import Session

_IGNORED = ("thinking", "redacted_thinking")
"""Blocks of an assistant's message that the policy never writes."""


class MessagesBody(Body):
    messages: list[Any] = Field(min_length=1)
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop_sequences: list[str] | None = None

    def ask(self) -> Ask:
        """The request, with its messages in OpenAI's form; Refusal if it asks for what the endpoint
        does not do."""
        messages: list[Message] = []
        system = text_of(self.system, "system")
        if system:
            messages.append({"role": "system", "content": system})
        for i, each in enumerate(self.messages):
            messages += _messages(each, f"messages[{i}]")
        if messages[-1]["role"] == "assistant":
            raise invalid("the last message is a user's or tool's", "messages")
        return Ask(
            messages=read_messages(messages),
            tools=offered_tools(_tools(self.tools), (self.tool_choice or {}).get("type")),
            max_tokens=self.max_tokens,
            stop=stop_texts(self.stop_sequences),
        )


def _tools(given: list[Any] | None) -> list[dict[str, Any]]:
    found = []
    for i, tool in enumerate(given or []):
        if not isinstance(tool, Mapping) or not isinstance(tool.get("input_schema"), Mapping):
            raise invalid("a tool has name and input_schema", f"tools[{i}]")
        function = {"name": tool.get("name"), "description": tool.get("description")}
        function["parameters"] = tool["input_schema"]
        found.append({"type": "function", "function": function})
    return found


def _messages(given: Any, where: str) -> list[Message]:
    """A message in OpenAI's form: each result of a tool is one of its own."""
    role = given.get("role") if isinstance(given, Mapping) else None
    if role not in ("user", "assistant", "system"):
        raise invalid("a message has the role user or assistant, and content", where)
    content = given.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content, where)}]
    results: list[Message] = []
    texts, calls = [], []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result" and role == "user":
            text = text_of(block.get("content"), f"{where}.content")
            call_id = block.get("tool_use_id")
            results.append({"role": "tool", "tool_call_id": call_id, "content": text})
        elif kind == "tool_use" and role == "assistant":
            name, arguments = block.get("name"), block.get("input")
            calls.append(sent_call(block.get("id"), name, arguments, where))
        elif kind not in _IGNORED:
            texts.append(text_of([block], f"{where}.content"))
    said: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        said["tool_calls"] = calls
    return [*results, *([said] if texts or calls or not results else [])]


async def answer_messages(session: Session, content: Mapping[str, Any]) -> HttpReply:
    """Answer a request; Refusal if it is invalid, and as of ``Session.answer``."""
    body = MessagesBody.read(content, session.policy.sampling)
    answer = await session.answer(body.ask())
    (choice,) = answer.choices
    found = {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": body.model or session.policy.model,
        "content": _blocks(choice),
        "stop_reason": _stop_reason(choice),
        "stop_sequence": choice.stop,
        "usage": {"input_tokens": len(answer.context), "output_tokens": answer.generated},
    }
    if body.return_token_ids:
        found |= token_fields(answer, choice)
    events = named_events(_events(found)) if body.stream else None
    return HttpReply(found, events, [choice.node])


async def count_tokens(session: Session, content: Mapping[str, Any]) -> HttpReply:
    """The number of tokens before the turn that a request asks for."""
    body = MessagesBody.read(content, session.policy.sampling)
    return HttpReply({"input_tokens": await session.count(body.ask())})


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.text or not choice.calls:
        blocks.append({"type": "text", "text": choice.text})
    for call in choice.calls:
        function = call["function"]
        arguments = function["arguments"]
        given = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}
        )
    return blocks


def _stop_reason(choice: Choice) -> str:
    if choice.stop is not None and choice.finish_reason == "stop":
        return "stop_sequence"
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return reasons[choice.finish_reason]


def _events(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    empty = {"content": [], "stop_reason": None, "stop_sequence": None}
    start = {**message, **empty, "usage": {**message["usage"], "output_tokens": 0}}
    yield {"type": "message_start", "message": start}
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            opening = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            opening = {**block, "input": {}}
            text = arguments_json(block["input"])
            delta = {"type": "input_json_delta", "partial_json": text}
        yield {"type": "content_block_start", "index": index, "content_block": opening}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ends = {key: message[key] for key in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ends, "usage": message["usage"]}
    yield {"type": "message_stop"}

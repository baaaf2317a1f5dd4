"""OpenAI's responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from mppo.agents.conversation import Message
from mppo.agents.endpoint.ask import Ask, Body, Choice, HttpReply, PolicyAnswer, named_events
from mppo.agents.endpoint.chat import arguments_json, offered_tools, token_fields
from mppo.agents.endpoint.messages import read_messages, sent_call, text_of
from mppo.agents.endpoint.refusal import Refusal, invalid
from mppo.agents.endpoint.session import Session

_IGNORED = ("reasoning", "item_reference")
"""Items of an input that the policy never writes."""


class ResponseBody(Body):
    input: str | list[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    def ask(self, previous: Mapping[str, list[Message]]) -> Ask:
        """The request, with its messages in OpenAI's chat form; Refusal if it asks for what the
        endpoint does not do. ``previous``: messages by the id of an earlier answer."""
        if ((self.text or {}).get("format") or {}).get("type", "text") != "text":
            raise invalid("answers are not constrained: leave it out", "text")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise invalid("max_output_tokens is at least 1", "max_output_tokens")
        messages: list[Message] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if self.previous_response_id is not None:
            earlier = previous.get(self.previous_response_id)
            if earlier is None:
                why = "the session has no such response"
                raise Refusal(404, why, param="previous_response_id")
            messages += earlier
        messages += _messages(self.input)
        if not messages:
            raise invalid("the input is empty", "input")
        return Ask(
            messages=read_messages(messages),
            tools=offered_tools(_tools(self.tools), self.tool_choice),
            max_tokens=self.max_output_tokens,
        )


def _tools(given: list[Any] | None) -> list[dict[str, Any]]:
    found = []
    for i, tool in enumerate(given or []):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise invalid("only tools of the type function are offered", f"tools[{i}]")
        keys = ("name", "description", "parameters")
        found.append({"type": "function", "function": {key: tool.get(key) for key in keys}})
    return found


def _messages(given: str | list[Any]) -> list[Message]:
    """The items of an input in chat form: calls belong to the assistant's message before them."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        where = f"input[{i}]"
        if not isinstance(item, Mapping):
            raise invalid("an item of the input is an object", where)
        kind = item.get("type", "message")
        if kind == "message":
            role = item.get("role")
            found.append({"role": role, "content": text_of(item.get("content"), where)})
        elif kind == "function_call":
            name, arguments = item.get("name"), item.get("arguments")
            call = sent_call(item.get("call_id"), name, arguments, where)
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = text_of(item.get("output"), where)
            call_id = item.get("call_id")
            found.append({"role": "tool", "tool_call_id": call_id, "content": text})
        elif kind not in _IGNORED:
            raise invalid(f"items of the type {kind!r} are not supported", where)
    return list(found)


async def answer_response(session: Session, content: Mapping[str, Any]) -> HttpReply:
    """Answer a request; Refusal if it is invalid, and as of ``Session.answer``."""
    body = ResponseBody.read(content, session.policy.sampling)
    ask = body.ask(session.previous)
    answer = await session.answer(ask)
    (choice,) = answer.choices
    found = _response(body, choice, answer, session.policy.model)
    said = ask.messages[1:] if body.instructions else ask.messages
    session.previous[found["id"]] = [*said, choice.message]
    if body.return_token_ids:
        found |= token_fields(answer, choice)
    events = named_events(_events(found)) if body.stream else None
    return HttpReply(found, events, [choice.node])


def _response(
    body: ResponseBody, choice: Choice, answer: PolicyAnswer, model: str
) -> dict[str, Any]:
    is_cut = choice.finish_reason == "length"
    status = "incomplete" if is_cut else "completed"
    before, after = len(answer.context), answer.generated
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": body.instructions,
        "model": body.model or model,
        "output": _items(choice, status),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "usage": {
            "input_tokens": before,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": after,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": before + after,
        },
    }


def _items(choice: Choice, status: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if choice.text or not choice.calls:
        part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}
        head = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "status": status}
        items.append({**head, "role": "assistant", "content": [part]})
    for call in choice.calls:
        function = call["function"]
        head = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "status": "completed"}
        arguments = arguments_json(function["arguments"])
        items.append(
            {**head, "call_id": call["id"], "name": function["name"], "arguments": arguments}
        )
    return items


def _events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    number = count()
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    for name in ("created", "in_progress"):
        yield {"type": f"response.{name}", "sequence_number": next(number), "response": begun}
    for index, item in enumerate(response["output"]):
        for event in _item_events(item):
            place = {"sequence_number": next(number), "output_index": index}
            yield {**event, **place}
    last = {"type": f"response.{response['status']}", "response": dict(response)}
    yield {**last, "sequence_number": next(number)}


def _item_events(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    name, text = {"item_id": item["id"]}, "response.output_text"
    if item["type"] == "message":
        part, place = item["content"][0], {**name, "content_index": 0}
        empty = {**item, "status": "in_progress", "content": []}
        yield {"type": "response.output_item.added", "item": empty}
        yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
        yield {"type": f"{text}.delta", **place, "delta": part["text"], "logprobs": []}
        yield {"type": f"{text}.done", **place, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **place, "part": part}
    else:
        call, arguments = "response.function_call_arguments", item["arguments"]
        empty = {**item, "status": "in_progress", "arguments": ""}
        yield {"type": "response.output_item.added", "item": empty}
        yield {"type": f"{call}.delta", **name, "delta": arguments}
        yield {"type": f"{call}.done", **name, "arguments": arguments, "name": item["name"]}
    yield {"type": "response.output_item.done", "item": item}

"""Chat messages as clients send them, in one form, and keys that compare conversations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mppo.agents.conversation import Message
from mppo.agents.endpoint.refusal import invalid
from mppo.safety.input_error import InputError
from mppo.safety.input_files import parse_json

_ROLES = {"developer": "system", "function": "tool"}
"""Roles of OpenAI's that chat templates know by another name."""
_KNOWN = ("system", "user", "assistant", "tool")


def read_messages(given: Sequence[Any]) -> tuple[Message, ...]:
    """OpenAI's chat messages in the form that chat templates take.

    Content is a text, a tool call's arguments are an object where they are valid JSON, and fields
    that are null or unknown are left out. Refusal if a message has no known role, or holds
    something other than text.
    """
    return tuple(_message(each, f"messages[{i}]") for i, each in enumerate(given))


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, Mapping):
        raise invalid("a message is an object with role and content", where)
    role = given.get("role")
    role = _ROLES.get(role, role) if isinstance(role, str) else role
    if role not in _KNOWN:
        raise invalid(f"role {role!r} is none of {', '.join(_KNOWN)}", f"{where}.role")
    found: dict[str, Any] = {
        "role": role,
        "content": text_of(given.get("content"), f"{where}.content"),
    }
    for key in ("name", "tool_call_id"):
        value = given.get(key)
        if isinstance(value, str) and value and role != "assistant":
            found[key] = value
    calls = given.get("tool_calls")
    if calls and role == "assistant":
        if not isinstance(calls, list):
            raise invalid("tool_calls is a list", f"{where}.tool_calls")
        found["tool_calls"] = [_call(each, f"{where}.tool_calls") for each in calls]
    return found


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: a text, parts with texts, or null; else Refusal."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise invalid("content is a text, or a list of parts with text", where)
        texts.append(text)
    return "".join(texts)


def _call(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping):
        raise invalid("a tool call has a function with name and arguments", where)
    return sent_call(given.get("id"), function.get("name"), function.get("arguments"), where)


def sent_call(call_id: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """As ``tool_call``, for what a client sends; Refusal if the call has no name."""
    if not isinstance(name, str):
        raise invalid("a tool call has a name", where)
    return tool_call(call_id if isinstance(call_id, str) else "", name, arguments)


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A tool call as chat templates take it; arguments are an object, or its JSON."""
    if isinstance(arguments, str):
        try:
            read = parse_json(arguments)
        except InputError:
            read = None
        arguments = read if isinstance(read, dict) else arguments
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"id": call_id, "type": "function", "function": function}


def read_tools(given: Any) -> tuple[Mapping[str, Any], ...]:
    """Schemas of tools in OpenAI's form; Refusal if they are not functions with names."""
    tools = given or []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise invalid("a tool is {type: function, function: {name, ...}}", f"tools[{i}]")
    functions = [{k: v for k, v in tool["function"].items() if v is not None} for tool in tools]
    return tuple({"type": "function", "function": function} for function in functions)


def history_keys(tools: Sequence[Any], messages: Sequence[Message]) -> list[str]:
    """Keys of the first message, the first two, and so on; equal for equal histories.

    What clients change in passing makes no difference: ids of tool calls, the order and the spaces
    of JSON, and blanks around an assistant's text.
    """
    key, found = _digest("", json.dumps(list(tools), sort_keys=True)), []
    for message in messages:
        key = next_key(key, message)
        found.append(key)
    return found


def next_key(key: str, message: Message) -> str:
    """The key of a history with one more message."""
    if message["role"] == "assistant":
        calls = [each["function"] for each in message.get("tool_calls", ())]
        said = json.dumps(calls, sort_keys=True) if calls else ""
        return _digest(key, "assistant", message["content"].strip(), said)
    return _digest(key, message["role"], message["content"], message.get("name"))


def _digest(*parts: str | None) -> str:
    # by repr, not JSON, which takes longer: each request sends its whole history
    return hashlib.sha256(repr(parts).encode()).hexdigest()

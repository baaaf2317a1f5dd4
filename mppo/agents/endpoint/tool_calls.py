"""Tool calls in the text of a turn, in the format of the model's family.

``hermes`` is read here, without SGLang; every other format by SGLang's parser of that name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mppo.agents.hermes import BEGIN, call_texts
from mppo.recipe.errors import nearest
from mppo.safety.foreign_text import valid_text
from mppo.safety.input_error import InputError

HERMES = "hermes"
Call = tuple[str, str]
"""Name of a tool and the JSON of its arguments."""


ToolParser = Callable[[str, Sequence[Mapping[str, Any]]], tuple[str, list[Call]]]
"""From the text of a turn (special tokens included) and schemas of tools in OpenAI's form the text
besides the calls, and the calls."""


def tool_parser(name: str = HERMES) -> ToolParser:
    """The parser of a format; InputError if there is none, or SGLang is not installed."""
    if name == HERMES:
        return parse_hermes
    try:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
    except ImportError as error:
        raise InputError(
            f'tool parser {name}: needs SGLang ({error}): pip install "mppo[gpu]", or use {HERMES}'
        ) from error
    formats = FunctionCallParser.ToolCallParserEnum
    if name not in formats:
        hint = nearest(name, formats) or f"one of {', '.join(sorted(formats))}"
        raise InputError(f"tool parser {name}: SGLang has no such format; use {hint}")

    def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
        parser = FunctionCallParser([Tool(**tool) for tool in tools], name)
        if not parser.has_tool_call(text):
            return text, []
        rest, found = parser.parse_non_stream(text)
        return rest, [(call.name or "", valid_text(call.parameters)) for call in found]

    return parse


def parse_hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
    """Tool calls in the Hermes format, as SGLang's parser reads them; see ``ToolParser``.

    Calls of unknown tools are left out; a turn with a call that is not JSON is text as a whole.
    """
    known = {tool["function"]["name"] for tool in tools}
    calls = []
    for each in call_texts(text):
        try:
            content = json.loads(each)
        except (ValueError, RecursionError):
            return text, []
        for call in content if isinstance(content, list) else [content]:
            if not isinstance(call, dict):
                return text, []
            name, arguments = call.get("name"), call.get("parameters") or call.get("arguments", {})
            if isinstance(name, str) and name in known:
                calls.append((name, json.dumps(arguments)))
    return (text.partition(BEGIN)[0].strip(), calls) if calls else (text, [])

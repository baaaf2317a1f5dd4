"""An agent that runs tools: calls in the Hermes format, as Qwen's chat templates ask for them.

The policy writes ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once or several
times in a turn. The results follow as messages of the role ``tool``. A turn without a call ends the
conversation.

Source: https://github.com/NousResearch/Hermes-Function-Calling; verl's ``multi_turn.format:
hermes``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mppo.agents.conversation import Conversation
from mppo.rewards.workers.user_function import import_function

BEGIN, _END = "<tool_call>", "</tool_call>"
FROM_ROW = ("ground_truth", "extra_info")
"""Parameters that a tool gets from the data row."""


class HermesAgent:
    """Runs the tool calls of a turn, and ends the conversation after a turn without one.

    A call that is not valid, or whose tool raises, has the error as its result: the policy can
    correct it.

    Args:
        tools: ``rollout.agent.tools``: ``path``, ``name`` and ``parameters`` of each.
        max_calls: most calls of a turn that are run.
        max_characters: a longer result is cut.
    """

    def __init__(
        self, tools: Sequence[Mapping[str, Any]], max_calls: int = 4, max_characters: int = 1024
    ) -> None:
        self._tools = {tool["name"]: tool for tool in tools}
        self._functions = {tool["name"]: import_function(tool["path"]) for tool in tools}
        for tool in tools:
            if not callable(self._functions[tool["name"]]):
                raise TypeError(f"rollout.agent.tools: {tool['path']} is not a function")
        self._max_calls, self._max_characters = max_calls, max_characters

    def __call__(self, conversation: Conversation) -> list[dict[str, str]] | None:
        calls = call_texts(conversation.text)[: self._max_calls]
        if conversation.is_last or not calls:
            return None
        return [{"role": "tool", "content": self._run(call, conversation)} for call in calls]

    def _run(self, call: str, conversation: Conversation) -> str:
        """The result of a call, or what is wrong with it."""
        try:
            name, arguments = self._read(call)
            function = self._functions[name]
            takes = inspect.signature(function).parameters
            row = {key: getattr(conversation, key) for key in FROM_ROW if key in takes}
            return str(function(**arguments, **row))[: self._max_characters]
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"[: self._max_characters]

    def _read(self, call: str) -> tuple[str, dict[str, Any]]:
        """Name and arguments of a call; ValueError if they are not valid."""
        content = json.loads(call)
        if not isinstance(content, dict) or not isinstance(content.get("arguments", {}), dict):
            raise ValueError('write {"name": NAME, "arguments": {...}}')
        name, arguments = content.get("name"), content.get("arguments", {})
        if not isinstance(name, str) or name not in self._tools:
            raise ValueError(f"no tool {name!r}; the tools are {', '.join(self._tools)}")
        schema = self._tools[name].get("parameters", {})
        known = schema.get("properties", {})
        for key in schema.get("required", []):
            if key not in arguments:
                raise ValueError(f"{name} needs the argument {key}")
        for key in arguments:
            if key not in known:
                raise ValueError(f"{name} has no argument {key}; it has {', '.join(known)}")
        return name, arguments


def call_texts(text: str) -> list[str]:
    """What the tags of a turn's calls enclose.

    In one pass: a regular expression would search the end of each of many unclosed tags anew.
    """
    found = (part.partition(BEGIN) for part in text.split(_END)[:-1])
    return [call for _, begin, call in found if begin]

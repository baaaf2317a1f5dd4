"""The user's agent and its tools, imported and compared with the recipe before a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from mppo.agents.conversation import Conversation, is_async, make_agent
from mppo.agents.hermes import FROM_ROW
from mppo.recipe.errors import ConfigError, ConfigIssue, nearest
from mppo.recipe.sections.agent import AgentConfig, ToolConfig
from mppo.rewards.workers.named_code import import_callable

KEY, RUN_KEY = "rollout.agent.path", "rollout.agent.run"
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
"""Types of JSON schema."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_agent(config: AgentConfig) -> None:
    """Import an agent and its tools once, in this process, and look at their parameters;
    ConfigError if the agent cannot be imported, or does not accept its arguments."""
    if config.run is not None:
        _check_program(config.run, config.arguments)
    elif config.path is not None:
        imported_waits(config)


def _check_program(name: str, arguments: Mapping[str, Any]) -> None:
    if find_spec("openai") is None:
        fix = 'pip install "mppo[agents]"'
        raise ConfigError([ConfigIssue(RUN_KEY, name, "its client needs the package openai", fix)])
    found = import_callable(RUN_KEY, name, "agent", "name a coroutine function of it")
    fix = "write async def run(client, task), and rollout.agent.arguments by name"
    if not inspect.iscoroutinefunction(found):
        raise ConfigError([ConfigIssue(RUN_KEY, name, "it is not a coroutine function", fix)])
    try:
        inspect.signature(found).bind(None, None, **arguments)
    except TypeError as error:
        why = f"it cannot be called with a client and a task: {error}"
        raise ConfigError([ConfigIssue(RUN_KEY, name, why, fix)]) from error


def imported_waits(config: AgentConfig) -> bool:
    """Import an answering agent and its tools once; whether it is a coroutine function. ConfigError
    as of ``check_agent``."""
    tools = enumerate(config.tools)
    issues = [issue for number, tool in tools for issue in tool_issues(number, tool)]
    if issues:
        raise ConfigError(issues)
    found = import_callable(KEY, str(config.path), "agent", "name a function or class of it")
    return is_async(made(config, found))


def made(config: AgentConfig, found: Any) -> Callable[[Conversation], Any]:
    """``make_agent`` of a function or class; ConfigError if it does not accept its arguments."""
    name = str(config.path)
    try:
        return make_agent(found, config.call_arguments)
    except Exception as error:
        why = f"it cannot be called as an agent: {type(error).__name__}: {error}"
        fix = "accept one conversation, and rollout.agent.arguments by name (a class: in __init__)"
        raise ConfigError([ConfigIssue(KEY, name, why, fix)]) from error


def tool_issues(number: int, tool: ToolConfig) -> Iterator[ConfigIssue]:
    """What is wrong with a tool; ``number``: its place in ``rollout.agent.tools``."""
    key = f"rollout.agent.tools.{number}"
    yield from _type_issues(f"{key}.parameters", tool.parameters)
    properties = tool.parameters.get("properties", {})
    required = tool.parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        why = "properties is not an object, or required not a list"
        yield ConfigIssue(f"{key}.parameters", tool.parameters, why, "write a JSON schema")
        return
    fix = f"the properties are {', '.join(properties) or 'none'}"
    for name in required:
        if name not in properties:
            why = f"parameters.properties has no {name!r}"
            yield ConfigIssue(f"{key}.parameters.required", name, why, fix)
    try:
        found = import_callable(f"{key}.path", tool.path, "tool", "name a function of it")
        takes = inspect.signature(found).parameters
    except ConfigError as error:
        yield from error.issues
    except (TypeError, ValueError):  # a function in C may have no signature
        return
    else:
        yield from _signature_issues(key, tool.path, properties, takes)


def _signature_issues(
    key: str, path: str, properties: dict[str, Any], takes: Any
) -> Iterator[ConfigIssue]:
    """Arguments of the schema that a function does not take, and those that it needs besides."""
    named = {name: each for name, each in takes.items() if each.kind in _BY_NAME}
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
    for name in properties:
        if name not in named and not takes_any:
            guess = nearest(name, list(named))
            fix = f"did you mean {guess!r}? " if guess else ""
            fix += f"its parameters are {', '.join(named) or 'none'}"
            why = f"{path} has no such parameter: every call would fail"
            yield ConfigIssue(f"{key}.parameters.properties", name, why, fix)
    for name, each in named.items():
        if each.default is each.empty and name not in properties and name not in FROM_ROW:
            why = f"{path} needs {name}, which the schema does not have: every call would fail"
            fix = f"describe {name} in parameters.properties, or give it a default"
            yield ConfigIssue(f"{key}.parameters.properties", list(properties), why, fix)


def _type_issues(key: str, schema: Any) -> Iterator[ConfigIssue]:
    """Types in a schema that JSON does not have."""
    if not isinstance(schema, dict):
        return
    given = schema.get("type")
    for name in given if isinstance(given, list) else [given]:
        if isinstance(name, str) and name not in _TYPES:
            guess = nearest(name, _TYPES)
            fix = f"did you mean {guess!r}? " if guess else ""
            fix += f"the types are {', '.join(_TYPES)}"
            yield ConfigIssue(f"{key}.type", name, "JSON schema has no such type", fix)
    properties = schema.get("properties")
    for name, content in properties.items() if isinstance(properties, dict) else ():
        yield from _type_issues(f"{key}.properties.{name}", content)
    yield from _type_issues(f"{key}.items", schema.get("items"))

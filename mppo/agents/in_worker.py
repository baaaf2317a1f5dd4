"""Calls of the user's agent in a worker."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from mppo.agents.conversation import Conversation, read_reply
from mppo.rewards.workers.user_function import FunctionForm, call_concurrently, import_function
from mppo.rewards.workers.worker import EncodedResult


def load_in_worker(
    name: str, arguments: Mapping[str, Any], timeout_s: float
) -> Callable[[Sequence[Conversation]], Sequence[Any]]:
    """Return the agent as a function of several conversations.

    Args:
        name: of the agent.
        arguments: of the class, or those of the function besides the conversation.
        timeout_s: seconds after which a call of an async agent is cancelled.
    """
    return answers_of(make_agent(import_function(name), arguments), timeout_s)


def answers_of(
    agent: Callable[[Conversation], Any], timeout_s: float
) -> Callable[[Sequence[Conversation]], Sequence[Any]]:
    """An agent as a function of several conversations; ``timeout_s`` as of ``load_in_worker``."""
    if not is_async(agent):
        return lambda items: [_encoded(agent(item)) for item in items]

    async def answer(items: Sequence[Conversation]) -> EncodedResult:
        return _encoded(await agent(items[0]))

    run, form = asyncio.new_event_loop().run_until_complete, FunctionForm(is_async=True)
    return lambda items: run(call_concurrently(answer, items, form, timeout_s))


def is_async(agent: Callable[..., Any]) -> bool:
    """Whether calls of an agent are coroutines."""
    called = (agent, getattr(agent, "__call__", None))  # noqa: B004  # an object's own
    return any(map(inspect.iscoroutinefunction, called))


def _encoded(result: Any) -> EncodedResult:
    return EncodedResult(read_reply(result).to_json())


def make_agent(found: Any, arguments: Mapping[str, Any]) -> Callable[[Conversation], Any]:
    """A callable of one conversation.

    Args:
        found: the user's function or class.
        arguments: of the class, or those of the function besides the conversation.

    Raises:
        TypeError: the arguments do not fit.
    """
    if inspect.isclass(found):
        agent = cast("Callable[[Conversation], Any]", found(**arguments))
        inspect.signature(agent).bind(None)
        return agent
    inspect.signature(found).bind(None, **arguments)
    return partial(found, **arguments)

"""The process in which an agent's function runs (``rollout.agent.run`` and ``path``).

``python -m mppo.agents.function_host FORM NAME ARGUMENTS MEMORY`` reads calls as lines of JSON, and
writes their results as lines of JSON. It runs calls of coroutine functions all at the same time,
and others one by one. What the function prints goes to the standard error output.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from mppo.agents.conversation import Conversation, is_async, make_agent, read_reply
from mppo.rewards.result import NoScore
from mppo.rewards.workers.confinement import limit
from mppo.rewards.workers.user_function import import_function
from mppo.safety.python_file import describe_error

LINE_BYTES = 1 << 26
"""Longest line between the rank and the process."""
Answer = Callable[[Mapping[str, Any]], Awaitable[Any]]
"""The result of a call, which is JSON."""


async def serve(answer: Answer, results: int) -> None:
    """Answer calls until the standard input ends; ``results``: file descriptor."""
    _write(results, {})
    loop, running = asyncio.get_running_loop(), dict[int, asyncio.Task[None]]()
    lines = asyncio.StreamReader(LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        order = json.loads(line)
        if order.get("cancel"):
            if task := running.pop(order["id"], None):
                task.cancel()
        else:
            running[order["id"]] = task = asyncio.create_task(_call(answer, order, results))
            task.add_done_callback(lambda _, number=order["id"]: running.pop(number, None))


async def _call(answer: Answer, order: Mapping[str, Any], results: int) -> None:
    """Write the result of a call, or why it has none."""
    number = {"id": order["id"]}
    try:
        found = None if order.get("ping") else await answer(order)
        _write(results, number | {"result": found})
    except NoScore as why:
        _write(results, number | {"error": f"its reply {why}"})
    except MemoryError:
        _write(results, number | {"error": "it needs more than rollout.agent.memory_mb"})
    except Exception as error:
        _write(results, number | {"error": describe_error(error)})


def _write(results: int, value: Mapping[str, Any]) -> None:
    """Write a line; a pipe may take it in parts."""
    left = json.dumps(value).encode() + b"\n"
    while left:
        left = left[os.write(results, left) :]


def _run(name: str, arguments: Mapping[str, Any]) -> Answer:
    """Runs an episode of a coroutine function of a client and a task."""
    from httpx import create_ssl_context
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient  # takes seconds, before any episode

    function = partial(import_function(name), **arguments)
    certificates = create_ssl_context()  # each client would read them anew, for 25 ms

    async def answer(order: Mapping[str, Any]) -> Any:
        async with AsyncOpenAI(
            base_url=order["base_url"],
            api_key=order["api_key"],
            timeout=None,
            max_retries=5,
            http_client=DefaultAsyncHttpxClient(verify=certificates),
        ) as client:
            return await function(client, order["task"])

    return answer


def _path(name: str, arguments: Mapping[str, Any]) -> Answer:
    """Calls an agent with a conversation."""
    agent = make_agent(import_function(name), arguments)
    waits = is_async(agent)

    async def answer(order: Mapping[str, Any]) -> str:
        found = agent(Conversation(**order["conversation"]))
        return read_reply(await found if waits else found).to_json()

    return answer


def main(form: str, name: str, arguments: str, memory_mb: str) -> None:
    """Import the function and serve it.

    Args:
        form: ``run`` or ``path``.
        arguments: further ones of the function, as JSON.
        memory_mb: most address space, MiB; empty: no limit.
    """
    results = os.dup(1)
    os.dup2(2, 1)
    if memory_mb:
        limit({"AS": int(memory_mb) << 20})
    answer = {"run": _run, "path": _path}[form](name, json.loads(arguments))
    asyncio.run(serve(answer, results))


if __name__ == "__main__":
    main(*sys.argv[1:])

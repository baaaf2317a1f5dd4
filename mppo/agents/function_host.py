"""The process in which an agent's function runs (``rollout.agent.run`` and ``path``).

``python -m mppo.agents.function_host FORM NAME ARGUMENTS MEMORY`` reads calls as lines of JSON, and
writes their results as lines of JSON. It runs calls of coroutine functions all at the same time,
and others one by one, without an event loop: they may run one of their own. What the function
prints goes to the standard error output, and its standard input is empty.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, BinaryIO

from mppo.agents.conversation import (
    Conversation,
    describe_failure,
    is_async,
    make_agent,
    read_reply,
)
from mppo.rewards.workers.confinement import limit
from mppo.rewards.workers.user_function import import_function

LINE_BYTES = 1 << 26
"""Longest line between the rank and the process."""
Answer = Callable[[Mapping[str, Any]], Awaitable[Any]]
"""The result of a call, which is JSON."""


def serve_one_by_one(
    answer: Callable[[Mapping[str, Any]], Any], orders: BinaryIO, results: int
) -> None:
    """Answer calls until the orders end; ``results``: file descriptor."""
    _write(results, {})
    for line in orders:
        order = json.loads(line)
        try:
            _write(results, {"id": order["id"], "result": answer(order)})
        except BaseException as error:  # an exit of its own ends no other call
            _write(results, {"id": order["id"], "error": _why(error)})


async def serve(answer: Answer, orders: BinaryIO, results: int) -> None:
    """Answer calls, all at the same time, until the orders end; ``results``: file descriptor."""
    _write(results, {})
    loop, running = asyncio.get_running_loop(), dict[int, asyncio.Task[None]]()
    lines = asyncio.StreamReader(LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), orders)
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
    except BaseException as error:  # an exit or a cancellation of its own ends no other call
        _write(results, number | {"error": _why(error)})


def _why(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "it needs more than rollout.agent.memory_mb"
    return describe_failure(error)


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


def _serve_path(name: str, arguments: Mapping[str, Any], orders: BinaryIO, results: int) -> None:
    """Serve calls of an agent with a conversation."""
    agent = make_agent(import_function(name), arguments)

    async def answer(order: Mapping[str, Any]) -> str:
        return read_reply(await agent(Conversation(**order["conversation"]))).to_json()

    def answer_at_once(order: Mapping[str, Any]) -> str:
        return read_reply(agent(Conversation(**order["conversation"]))).to_json()

    if is_async(agent):
        asyncio.run(serve(answer, orders, results))
    else:
        serve_one_by_one(answer_at_once, orders, results)


def main(form: str, name: str, arguments: str, memory_mb: str) -> None:
    """Import the function and serve it; ``arguments`` are JSON, ``memory_mb`` (MiB of address
    space) is empty without a limit."""
    orders, results = os.fdopen(os.dup(0), "rb"), os.dup(1)
    with open(os.devnull, "rb") as nothing:  # a program that it starts would read the orders
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    if memory_mb:
        limit({"AS": int(memory_mb) << 20})
    if form == "path":
        _serve_path(name, json.loads(arguments), orders, results)
    else:
        asyncio.run(serve(_run(name, json.loads(arguments)), orders, results))


if __name__ == "__main__":
    main(*sys.argv[1:])

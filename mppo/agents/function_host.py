"""The process in which an agent's coroutine function runs (``rollout.agent.run``).

``python -m mppo.agents.function_host NAME ARGUMENTS`` reads episodes as lines of JSON, runs them
all at the same time, and writes their results as lines of JSON. What the function prints goes to
the standard error output.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from ssl import SSLContext
from typing import Any

LINE_BYTES = 1 << 26
"""Longest line between the rank and the process."""


async def serve(function: Callable[..., Coroutine[Any, Any, Any]], results: int) -> None:
    """Run episodes until the standard input ends.

    Args:
        function: of a client and a task.
        results: file descriptor for the results.
    """
    import openai  # noqa: F401  # takes seconds, before an episode's time begins to count
    from httpx import create_ssl_context

    certificates = create_ssl_context()  # each client would read them anew, for 25 ms
    _write(results, "{}")
    loop, running = asyncio.get_running_loop(), dict[int, asyncio.Task[None]]()
    lines = asyncio.StreamReader(LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        order = json.loads(line)
        if order.get("cancel"):
            if task := running.pop(order["id"], None):
                task.cancel()
        else:
            work = _episode(function, order, results, certificates)
            running[order["id"]] = task = asyncio.create_task(work)
            task.add_done_callback(lambda _, number=order["id"]: running.pop(number, None))


async def _episode(
    function: Callable[..., Coroutine[Any, Any, Any]],
    order: Mapping[str, Any],
    results: int,
    certificates: SSLContext,
) -> None:
    """Run an episode and write its result."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    answer: dict[str, Any] = {"id": order["id"]}
    try:
        async with AsyncOpenAI(
            base_url=order["base_url"],
            api_key=order["api_key"],
            timeout=None,
            max_retries=5,
            http_client=DefaultAsyncHttpxClient(verify=certificates),
        ) as client:
            answer["result"] = await function(client, order["task"])
        text = json.dumps(answer)
    except Exception as error:
        text = json.dumps({"id": order["id"], "error": f"{type(error).__name__}: {error}"})
    _write(results, text)


def _write(results: int, text: str) -> None:
    """Write a line; a pipe may take it in parts."""
    left = text.encode() + b"\n"
    while left:
        left = left[os.write(results, left) :]


def main(arguments: list[str]) -> None:
    """Import the function and serve it.

    Args:
        arguments: name of the function; its further arguments as JSON.
    """
    from mppo.rewards.workers.user_function import import_function

    results = os.dup(1)
    os.dup2(2, 1)
    function = partial(import_function(arguments[0]), **json.loads(arguments[1]))
    asyncio.run(serve(function, results))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Calls of the user's agent that answers the policy's turns (``rollout.agent.path``)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from mppo.agents.agent_processes import AgentProcesses, ProcessEnded
from mppo.agents.conversation import Conversation, Reply, describe_failure, is_async, read_reply
from mppo.recipe.sections.agent import AgentConfig

_RECENT = 256
"""The number of last calls whose time-outs shorten the time limit of the next ones."""


class TurnAnswers(Protocol):
    """Answers turns of many conversations, in one event loop."""

    async def start(self) -> None:
        """Start what all calls share; what has ended is started again."""

    async def answer(self, conversation: Conversation) -> Reply | str:
        """The agent's reply, or why there is none."""
        ...

    async def stop(self) -> None:
        """End every process."""


class HostedAnswers:
    """``TurnAnswers`` of an agent in processes of its own.

    A call that takes too long ends with its process. Calls that ended with their process are made
    once more, one at a time: it may have been killed from outside, and several calls of a coroutine
    function share it. So only the one at fault has no reply.
    """

    def __init__(self, config: AgentConfig, *, waits: bool) -> None:
        self._processes = AgentProcesses(
            "path", str(config.path), config.call_arguments, config.processes, config.memory_mb
        )
        self._config, self._waits = config, waits
        self._free = asyncio.Semaphore(config.most_at_once if waits else config.processes)
        self._alone = asyncio.Lock()
        self._late: deque[bool] = deque(maxlen=_RECENT)
        self.start, self.stop = self._processes.start, self._processes.stop

    async def answer(self, conversation: Conversation) -> Reply | str:
        try:
            async with self._free:
                return await self._answer(conversation)
        except ProcessEnded:
            pass
        async with self._alone, self._free:
            try:
                return await self._answer(conversation)
            except ProcessEnded as why:
                return str(why)

    async def _answer(self, conversation: Conversation) -> Reply | str:
        process = await self._processes.free()
        # every time-out shortens the limit, or many slow calls together would stop the run
        limit_s = self._config.timeout_s / (1 + sum(self._late) // self._config.processes)
        call = process.call({"conversation": vars(conversation)})
        try:
            found = await asyncio.wait_for(call, limit_s)
        except asyncio.CancelledError:
            if not self._waits:  # it would go on with the call
                await process.stop()
            raise
        except asyncio.TimeoutError:
            self._late.append(True)
            if not self._waits or not await process.responds():
                await process.stop()
            return _late(self._config.timeout_s) + ", or what other time-outs leave of it"
        self._late.append(False)
        if "error" in found:
            return found["error"]
        try:
            return Reply.from_json(found["result"])
        except (ValueError, RecursionError) as error:
            return f"its reply cannot be read: {error}"


class GivenAnswers(TurnAnswers):
    """``TurnAnswers`` of an agent of the program that started the run, in this process."""

    def __init__(self, agent: Callable[[Conversation], Any], timeout_s: float) -> None:
        self._agent, self._timeout_s = agent, timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agent")

    async def answer(self, conversation: Conversation) -> Reply | str:
        """See ``TurnAnswers.answer``; only a coroutine function has a time limit."""
        call: asyncio.Future[Reply | str]
        if is_async(self._agent):
            call, limit_s = asyncio.ensure_future(self._await(conversation)), self._timeout_s
        else:
            loop = asyncio.get_running_loop()
            call, limit_s = loop.run_in_executor(self._thread, self._call, conversation), None
        try:
            await asyncio.wait([call], timeout=limit_s)
            return call.result() if call.done() else _late(self._timeout_s)
        finally:
            call.cancel()

    async def _await(self, conversation: Conversation) -> Reply | str:
        try:
            return Reply.from_json(read_reply(await self._agent(conversation)).to_json())
        except BaseException as error:  # an exit of its own would end the episodes' event loop
            return describe_failure(error)

    def _call(self, conversation: Conversation) -> Reply | str:
        try:
            return Reply.from_json(read_reply(self._agent(conversation)).to_json())
        except BaseException as error:  # as above
            return describe_failure(error)


def _late(timeout_s: float) -> str:
    return f"it took longer than rollout.agent.timeout_s, {timeout_s:g} s"

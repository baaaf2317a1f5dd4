"""Processes that run an agent's function, each for many episodes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from mppo.agents.endpoint.session import Session
from mppo.agents.function_host import LINE_BYTES
from mppo.agents.program import (
    child_command,
    child_environment,
    end,
    failed,
    read_episode_result,
    task_of,
)
from mppo.batch.episode import EpisodeResult
from mppo.batch.prompt import Prompt
from mppo.safety.foreign_text import json_line, quoted

_ENDING_S = 5.0
_PING_S = 5.0


class ProcessEnded(Exception):
    """The process ended during a call."""


class AgentProcess:
    """A process of ``mppo.agents.function_host``.

    Attributes:
        ready: set once the process takes calls, or has ended.
        is_started: whether it has taken calls.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._numbers = process, count()
        self._waiting: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self.ready, self.is_started = asyncio.Event(), False
        self._reader = asyncio.create_task(self._read())

    @property
    def load(self) -> int:
        """Number of calls that run."""
        return len(self._waiting)

    @property
    def lives(self) -> bool:
        """Whether the process answers."""
        return not self._reader.done()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    async def call(self, order: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer to an order: ``result``, or ``error`` with a reason.

        Raises:
            ProcessEnded: the message names the exit code.
        """
        number, loop = next(self._numbers), asyncio.get_running_loop()
        self._waiting[number] = future = loop.create_future()
        self._send({"id": number, **order})
        try:
            return await future
        finally:
            if self._waiting.pop(number, None) is not None:  # cancelled
                self._send({"id": number, "cancel": True})

    async def responds(self) -> bool:
        """Whether the process still reads calls."""
        try:
            await asyncio.wait_for(self.call({"ping": True}), _PING_S)
        except (asyncio.TimeoutError, ProcessEnded):
            return False
        return True

    def _send(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # the reader says that the process has ended
            self._process.stdin.write(json_line(order, str).encode() + b"\n")

    async def _read(self) -> None:
        """Take results until the process ends."""
        assert self._process.stdout is not None
        with suppress(ValueError, OSError):  # a line that is too long ends the process
            while line := await self._process.stdout.readline():
                self.is_started = True
                self.ready.set()
                answer = json.loads(line)
                future = self._waiting.pop(answer.get("id"), None)
                if future is not None and not future.done():
                    future.set_result(answer)
        with suppress(asyncio.TimeoutError):  # its output has ended, and so it ends soon
            await asyncio.wait_for(self._process.wait(), _ENDING_S)
        await self.stop()
        self.ready.set()
        why = f"its process ended with exit code {self.exit_code}"
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ProcessEnded(why))
        self._waiting.clear()

    async def stop(self) -> None:
        """End the process."""
        if self._process.returncode is None:
            end(self._process)
        await self._process.wait()


class AgentProcesses:
    """The processes of one function.

    Args:
        form: ``run`` or ``path``, the key of ``rollout.agent`` that names it.
        arguments: further ones of the function.
        processes: number of processes.
        memory_mb: most address space of each, MiB; None: no limit.
    """

    def __init__(
        self,
        form: str,
        name: str,
        arguments: Mapping[str, Any],
        processes: int,
        memory_mb: int | None = None,
    ) -> None:
        module, limit = "mppo.agents.function_host", str(memory_mb or "")
        given = json.dumps(dict(arguments))
        self._command = [sys.executable, "-m", module, form, name, given, limit]
        self._count = processes
        self._processes: list[AgentProcess] = []
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the processes that do not run.

        Raises:
            RuntimeError: one ended at its start.
        """
        async with self._starting:
            self._processes = [process for process in self._processes if process.lives]
            while len(self._processes) < self._count:
                self._processes.append(await self._started())
            for process in self._processes:
                await process.ready.wait()
                if not process.is_started:
                    why = f"exit code {process.exit_code}; what it printed is above"
                    raise RuntimeError(f"a process of rollout.agent could not start: {why}")

    async def free(self) -> AgentProcess:
        """The process with the fewest calls."""
        await self.start()
        return min(self._processes, key=lambda process: process.load)

    async def stop(self) -> None:
        """End every process."""
        for process in self._processes:
            await process.stop()

    async def _started(self) -> AgentProcess:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *child_command(self._command),
            env=child_environment(),
            stdin=pipe,
            stdout=pipe,
            limit=LINE_BYTES,
        )
        return AgentProcess(process)


class HostedFunction:
    """A ``Program``: a coroutine function of a client and a task (``rollout.agent.run``)."""

    def __init__(self, processes: AgentProcesses) -> None:
        self._processes = processes

    async def start(self) -> None:
        """See ``Program.start``."""
        await self._processes.start()

    async def run(self, session: Session, prompt: Prompt) -> EpisodeResult:
        """See ``Program.run``."""
        where = {"base_url": session.base_url, "api_key": session.key}
        try:
            answer = await (await self._processes.free()).call({"task": task_of(prompt), **where})
        except ProcessEnded as why:
            return failed(str(why))
        error = answer.get("error")
        return failed(quoted(error)) if error else read_episode_result(answer.get("result"))

    async def stop(self) -> None:
        """See ``Program.stop``."""
        await self._processes.stop()

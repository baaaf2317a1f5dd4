"""Processes that run an agent's function, each for many episodes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from itertools import count
from typing import Any, BinaryIO

from mppo.agents.endpoint.session import Session
from mppo.agents.episode_program import (
    child_command,
    child_environment,
    end,
    failed,
    read_episode_result,
    task_of,
)
from mppo.agents.function_host import LINE_BYTES
from mppo.batch.episode import EpisodeResult
from mppo.batch.prompt import Prompt
from mppo.safety.foreign_text import json_line, quoted

_ENDING_S = 1.0
"""From the end of a process to that of its output, or the other way round."""
_POLL_S = 0.02
_ATTEMPTS = 3
_OF_SIGNALS = 128
_PING_S = 5.0


class ProcessEnded(Exception):
    """The process ended during a call."""


class AgentProcess:
    """A process of ``mppo.agents.function_host``, which reads orders from its standard input and
    writes to the pipe ``results``.

    Attributes:
        ready: set once the process takes calls, or has ended.
        is_started: whether it has taken calls.
    """

    def __init__(self, process: asyncio.subprocess.Process, results: BinaryIO) -> None:
        self._process, self._results, self._numbers = process, results, count()
        self._waiting: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self.ready, self.is_started, self._is_ending = asyncio.Event(), False, False
        self._watch = asyncio.create_task(self._until_end())

    @property
    def load(self) -> int:
        """Number of calls that run."""
        return len(self._waiting)

    @property
    def lives(self) -> bool:
        """Whether the process answers."""
        return not self._is_ending and self._process.returncode is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    async def call(self, order: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer to an order: ``result``, or ``error`` with a reason. ProcessEnded if the
        process ends before."""
        if self._watch.done():
            raise ProcessEnded(self._why())
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
        lines = asyncio.StreamReader(LINE_BYTES)
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), self._results
        )
        # a line that is too long ends the process
        with closing(pipe), suppress(ValueError, OSError):
            while line := await lines.readline():
                self.is_started = True
                self.ready.set()
                answer = json.loads(line)
                future = self._waiting.pop(answer.get("id"), None)
                if future is not None and not future.done():
                    future.set_result(answer)
        self._is_ending = True

    async def _until_end(self) -> None:
        """Take results until the process ends, then fail its calls."""
        reading = asyncio.create_task(self._read())
        # not Process.wait: a process that it has left behind may hold its pipes open
        while self._process.returncode is None and not reading.done():
            await asyncio.wait([reading], timeout=_POLL_S)
        await asyncio.wait([reading], timeout=_ENDING_S)
        reading.cancel()
        for _ in range(round(_ENDING_S / _POLL_S)):
            if self._process.returncode is None:
                await asyncio.sleep(_POLL_S)
        self._end()
        while self._process.returncode is None:
            await asyncio.sleep(_POLL_S)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.ready.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ProcessEnded(self._why()))
        self._waiting.clear()

    def _why(self) -> str:
        return f"its process ended with exit code {self.exit_code}"

    def _end(self) -> None:
        self._is_ending = True
        if self._process.returncode is None:
            end(self._process)

    async def stop(self) -> None:
        """End the process, and with it its calls."""
        self._end()
        await asyncio.wait([self._watch])


class AgentProcesses:
    """The processes of one function. ``form``: the key of ``rollout.agent`` that names it, ``run``
    or ``path``; ``memory_mb``: most address space of each, MiB; None: no limit."""

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
        """Start the processes that do not run; RuntimeError if one ended at its start, by itself or
        several times by a signal."""
        async with self._starting:
            for attempt in range(_ATTEMPTS):
                await self._start_missing()
                failed = [each.exit_code or 0 for each in self._processes if not each.is_started]
                if not failed:
                    return
                # a signal comes from outside, such as from the kernel for its memory
                by_itself = any(0 <= code <= _OF_SIGNALS for code in failed)
                if by_itself or attempt == _ATTEMPTS - 1:
                    why = f"exit code {failed[0]}; what it printed is above"
                    raise RuntimeError(f"a process of rollout.agent could not start: {why}")

    async def _start_missing(self) -> None:
        for process in self._processes:
            if not process.lives:
                await process.stop()
        self._processes = [process for process in self._processes if process.lives]
        while len(self._processes) < self._count:
            self._processes.append(await self._started())
        for process in self._processes:
            await process.ready.wait()

    async def free(self) -> AgentProcess:
        """The process with the fewest calls."""
        await self.start()
        return min(self._processes, key=lambda process: process.load)

    async def stop(self) -> None:
        """End every process."""
        for process in self._processes:
            await process.stop()

    async def _started(self) -> AgentProcess:
        reading, writing = os.pipe()
        results, command = os.fdopen(reading, "rb"), child_command(self._command)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, env=child_environment(), stdin=asyncio.subprocess.PIPE, stdout=writing
            )
        except BaseException:
            results.close()
            raise
        finally:
            os.close(writing)
        return AgentProcess(process, results)


class HostedFunction:
    """A ``Program``: a coroutine function of a client and a task (``rollout.agent.run``)."""

    def __init__(self, processes: AgentProcesses) -> None:
        self._processes = processes
        self.start, self.stop = processes.start, processes.stop

    async def run(self, session: Session, prompt: Prompt) -> EpisodeResult:
        where = {"base_url": session.base_url, "api_key": session.key}
        try:
            answer = await (await self._processes.free()).call({"task": task_of(prompt), **where})
        except ProcessEnded as why:
            return failed(str(why))
        error = answer.get("error")
        return failed(quoted(error)) if error else read_episode_result(answer.get("result"))

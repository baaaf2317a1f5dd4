"""An agent that is a coroutine function of a client and a task (``rollout.agent.run``)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from mppo.agents.function_host import LINE_BYTES
from mppo.agents.program import (
    EpisodeAccess,
    child_command,
    child_environment,
    end,
    failed,
    read_episode_result,
)
from mppo.batch.episode import EpisodeResult
from mppo.safety.foreign_text import json_line, quoted

KEY = "rollout.agent.run"
_ENDING_S = 5.0


class _Host:
    """A process that runs the function for many episodes at the same time.

    Attributes:
        ready: set once the process takes episodes, or has ended.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._numbers = process, count()
        self._waiting: dict[int, asyncio.Future[EpisodeResult]] = {}
        self.ready = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    @property
    def load(self) -> int:
        """Number of episodes that run."""
        return len(self._waiting)

    @property
    def lives(self) -> bool:
        """Whether the process answers."""
        return not self._reader.done()

    async def run(self, access: EpisodeAccess, task: Mapping[str, Any]) -> EpisodeResult:
        """See ``Program.run``."""
        number, loop = next(self._numbers), asyncio.get_running_loop()
        where = {"base_url": access.base_url, "api_key": access.api_key}
        self._waiting[number] = future = loop.create_future()
        self._send({"id": number, "task": task, **where})
        try:
            return await future
        finally:
            if self._waiting.pop(number, None) is not None:  # cancelled
                self._send({"id": number, "cancel": True})

    def _send(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # the reader says that the process has ended
            self._process.stdin.write(json_line(order).encode() + b"\n")

    async def _read(self) -> None:
        """Take results until the process ends."""
        assert self._process.stdout is not None
        with suppress(ValueError, OSError):  # a line that is too long ends the process
            while line := await self._process.stdout.readline():
                self.ready.set()
                answer = json.loads(line)
                future = self._waiting.pop(answer.get("id"), None)
                if future is not None and not future.done():
                    error = answer.get("error")
                    result = read_episode_result(answer.get("result"))
                    future.set_result(failed(quoted(error)) if error else result)
        with suppress(asyncio.TimeoutError):  # its output has ended, and so it ends soon
            await asyncio.wait_for(self._process.wait(), _ENDING_S)
        await self.stop()
        self.ready.set()
        why = f"its process ended with exit code {self._process.returncode}"
        for future in self._waiting.values():
            if not future.done():
                future.set_result(failed(why))
        self._waiting.clear()

    async def stop(self) -> None:
        """End the process."""
        if self._process.returncode is None:
            end(self._process)
        await self._process.wait()


class HostedFunction:
    """A ``Program``: the function runs in processes of its own, each with many episodes.

    Args:
        name: of the function.
        arguments: of the function besides client and task.
        processes: number of processes.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any], processes: int) -> None:
        self._command = [
            sys.executable, "-m", "mppo.agents.function_host", name, json.dumps(dict(arguments)),
        ]  # fmt: skip
        self._processes = processes
        self._hosts: list[_Host] = []
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """See ``Program.start``."""
        async with self._starting:
            self._hosts = [host for host in self._hosts if host.lives]
            while len(self._hosts) < self._processes:
                self._hosts.append(await self._started())
            for host in self._hosts:
                await host.ready.wait()

    async def run(self, access: EpisodeAccess, task: Mapping[str, Any]) -> EpisodeResult:
        """See ``Program.run``."""
        await self.start()
        return await min(self._hosts, key=lambda host: host.load).run(access, task)

    async def stop(self) -> None:
        """See ``Program.stop``."""
        for host in self._hosts:
            await host.stop()

    async def _started(self) -> _Host:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *child_command(self._command),
            env=child_environment(),
            stdin=pipe,
            stdout=pipe,
            limit=LINE_BYTES,
        )
        return _Host(process)

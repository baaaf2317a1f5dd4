"""What runs an episode: a program that talks to the policy over the endpoint."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from mppo.agents.endpoint.session import Session
from mppo.batch.episode import EpisodeResult
from mppo.batch.prompt import Prompt
from mppo.rewards.function import extra_info
from mppo.rewards.result import number
from mppo.safety.foreign_text import json_line, quoted

_TAIL_BYTES = 1 << 16
_SHOWN = 300
_HIDDEN = (
    "MPPO_ROLLOUT_API_KEY", "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE",
    "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Variables of the rank that its agents do not get: a library of theirs would join the ranks."""


class Program(Protocol):
    """Runs episodes, many at a time, in one event loop."""

    async def start(self) -> None:
        """Start what all episodes share; what has ended is started again."""

    async def run(self, session: Session, prompt: Prompt) -> EpisodeResult:
        """Run an episode, whose turns the session answers. If the call is cancelled, its
        processes end."""
        ...

    async def stop(self) -> None:
        """End every process."""


def task_of(prompt: Prompt) -> dict[str, Any]:
    """What an agent gets of a data row, as JSON: ``prompt`` (text), ``messages``, ``data_source``,
    ``ground_truth`` and ``extra_info``."""
    return {
        "prompt": prompt.text,
        "messages": opening_of(prompt),
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": extra_info(prompt),
    }


def opening_of(prompt: Prompt) -> list[dict[str, Any]]:
    """The messages of a prompt; one without messages is a user's."""
    return [dict(each) for each in prompt.messages] or [{"role": "user", "content": prompt.text}]


def read_episode_result(found: Any) -> EpisodeResult:
    """The result of an episode from what an agent says: None, a number, or a mapping with
    ``reward`` and ``numbers``."""
    reward, numbers = found, {}
    if isinstance(found, Mapping):
        unknown = [str(key) for key in found if key not in ("reward", "numbers")]
        if unknown:
            return failed(f"its result has {quoted(', '.join(unknown))}; give reward and numbers")
        reward, numbers = found.get("reward"), found.get("numbers") or {}
        if not isinstance(numbers, Mapping):
            return failed(f"its numbers are {quoted(repr(numbers))}, not a mapping")
    if reward is not None:
        reward = number(reward)
        if reward is None or not math.isfinite(reward):
            return failed(f"its reward is {quoted(repr(found))}, not a finite number")
    read = {str(name): number(value) for name, value in numbers.items()}
    return EpisodeResult(reward, {k: v for k, v in read.items() if v is not None})


def failed(why: str) -> EpisodeResult:
    """The result of an episode whose agent failed."""
    return EpisodeResult(error=why)


def child_command(command: Sequence[str]) -> list[str]:
    """A command that ends with this process, and all its processes with it."""
    return [sys.executable, "-m", "mppo.agents.child", str(os.getpid()), *command]


def child_environment(**more: str) -> dict[str, str]:
    """The environment of an agent's process."""
    return {name: value for name, value in os.environ.items() if name not in _HIDDEN} | more


def end(process: asyncio.subprocess.Process) -> None:
    """End a process of ``child_command``, and all its processes with it."""
    # not by Process.send_signal, which may take the exit code before asyncio reads it
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)


class CommandProgram(Program):
    """A command, started once for each episode (``rollout.agent.command``).

    It finds the policy by ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL`` and
    ``ANTHROPIC_API_KEY``, and gets its task as one line of JSON on its standard input. The last
    line of its standard output may be its result: a number, or ``{"reward": 1.0, "numbers": {}}``.
    """

    def __init__(self, command: str) -> None:
        self._command = shlex.split(command)

    async def run(self, session: Session, prompt: Prompt) -> EpisodeResult:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *child_command(self._command),
            env=child_environment(
                OPENAI_BASE_URL=session.base_url,
                OPENAI_API_KEY=session.key,
                ANTHROPIC_BASE_URL=session.anthropic_url,
                ANTHROPIC_API_KEY=session.key,
            ),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(json_line(task_of(prompt), str).encode() + b"\n")
        process.stdin.close()
        try:
            outputs = asyncio.gather(_tail(process.stdout), _tail(process.stderr))
            code, (said, complained) = await process.wait(), await outputs
        finally:
            if process.returncode is None:
                end(process)
                await process.wait()
        if code:
            lines = (complained or said).split("\n")
            why = f": {quoted(lines[-1][:_SHOWN])}" if lines[-1] else ""
            return failed(f"its command ended with exit code {code}{why}")
        return read_episode_result(_result_line(said))


async def _tail(stream: asyncio.StreamReader) -> str:
    """The last text of a stream, without white space at its end."""
    kept = b""
    while piece := await stream.read(_TAIL_BYTES):
        kept = (kept + piece)[-_TAIL_BYTES:]
    return kept.decode(errors="replace").strip()


def _result_line(said: str) -> Any:
    """The result in the last line of an output; None: there is none."""
    with suppress(ValueError, RecursionError):
        found = json.loads(said.rpartition("\n")[2])
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if is_number or (isinstance(found, dict) and "reward" in found):
            return found
    return None

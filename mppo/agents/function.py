"""The user's agent, which runs in processes of its own as a reward function does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from mppo.agents.conversation import Conversation, Reply
from mppo.agents.in_worker import answers_of, is_async, load_in_worker, make_agent
from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.sections.agent import AgentConfig
from mppo.rewards.function import import_callable
from mppo.rewards.result import NoScore
from mppo.rewards.workers.pool import Result, WorkerPool
from mppo.rewards.workers.server import DIED, NO_MEMORY, NO_SCORE, SCORE, TIMEOUT
from mppo.rewards.workers.worker import ScoringTask
from mppo.safety.python_file import describe_error

KEY = "rollout.agent.path"


class AgentFunction:
    """Calls an agent in separate processes of this rank, with one conversation at a time.

    Args:
        config: the recipe's section, with ``path``.

    Raises:
        ConfigError: the agent cannot be imported, or does not accept its arguments.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._is_async = _check(config)

    def __call__(self, conversations: Sequence[Conversation]) -> list[Reply | str]:
        """The reply to each conversation, or why there is none.

        Raises:
            RuntimeError: the processes cannot start, or something killed their server.
        """
        workers = self._config.processes
        # conversations of one call run concurrently in an async agent, and in turn in others
        per_call = -(-len(conversations) // workers) if self._is_async else 1
        found = self._pool.run(conversations, max(per_call, 1))
        return [self._read(result) for result in found]

    @cached_property
    def _pool(self) -> WorkerPool:
        config = self._config
        loader = f"{load_in_worker.__module__}:load_in_worker"
        arguments = (str(config.path), config.call_arguments, config.timeout_s)
        task = ScoringTask(loader, arguments, memory_mb=config.memory_mb)
        limit = config.timeout_s * (2 if self._is_async else 1)
        return WorkerPool(task, config.processes, limit, "rollout.agent")

    def _read(self, result: Result) -> Reply | str:
        if result.outcome == SCORE:
            return Reply.from_json(result.text)
        if result.outcome == NO_SCORE:
            return f"its reply {result.text}"
        return {
            DIED: f"its process ended: {result.text}",
            NO_MEMORY: "it needs more than rollout.agent.memory_mb",
            TIMEOUT: f"it took longer than rollout.agent.timeout_s, {self._config.timeout_s:g} s, "
            "or the part of it that is left after other time-outs",
        }.get(result.outcome, result.text)


class CallableAgent:
    """Calls an agent of the program that started the run, in this process and without limits.

    Args:
        config: the recipe's section; ``path`` is the agent's name in messages.
        given: the agent.

    Raises:
        ConfigError: it does not accept its arguments.
    """

    def __init__(self, config: AgentConfig, given: Callable[..., Any]) -> None:
        self._agent = _made(config, given)
        self._answer = answers_of(self._agent, config.timeout_s)
        # a thread of its own: a notebook runs an event loop in the main one
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agent")

    def __call__(self, conversations: Sequence[Conversation]) -> list[Reply | str]:
        """As of ``AgentFunction``."""
        if is_async(self._agent):
            return [self._read(each) for each in self._call(conversations)]
        return [self._read(found) for each in conversations for found in self._call([each])]

    def _call(self, conversations: Sequence[Conversation]) -> Sequence[Any]:
        try:
            return self._thread.submit(self._answer, conversations).result()
        except Exception as error:  # an async agent's errors are among its results
            return [error]

    def _read(self, found: Any) -> Reply | str:
        if isinstance(found, NoScore):
            return f"its reply {found}"
        if isinstance(found, BaseException):
            return describe_error(found)
        return Reply.from_json(found.text)


def _check(config: AgentConfig) -> bool:
    """Import an agent once, in this process; return whether it is async."""
    found = import_callable(KEY, str(config.path), "agent", "name a function or class of it")
    return is_async(_made(config, found))


def _made(config: AgentConfig, found: Any) -> Callable[[Conversation], Any]:
    """``make_agent``; a ConfigError says that the arguments do not fit."""
    name = str(config.path)
    try:
        return make_agent(found, config.call_arguments)
    except Exception as error:
        why = f"it cannot be called as an agent: {type(error).__name__}: {error}"
        fix = "accept one conversation, and rollout.agent.arguments by name (a class: in __init__)"
        raise ConfigError([ConfigIssue(KEY, name, why, fix)]) from error

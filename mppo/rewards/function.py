"""Scores from a Python function of the user."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mppo.batch import Prompt
from mppo.config.errors import ConfigError, ConfigIssue
from mppo.rewards.response import Response, describe, shorten
from mppo.rewards.scores import FailedScore, no_score
from mppo.rewards.workers.pool import Result, WorkerPool
from mppo.rewards.workers.server import DIED, NO_MEMORY, NO_SCORE, SCORE, TIMEOUT
from mppo.rewards.workers.user_function import import_function
from mppo.rewards.workers.worker import ScoringTask

SIGNATURE = "(data_source, solution_str, ground_truth, extra_info)"


@dataclass(frozen=True)
class FunctionReward:
    """Calls a function once per response, in one separate process per rank.

    Args:
        name: ``module:function`` or ``path.py:function``. The function takes ``data_source``,
            ``solution_str`` (the response), ``ground_truth`` and ``extra_info`` by name, and
            returns a number, or a dict with ``score`` and further numbers: the signature of verl's
            ``compute_score``.
        kwargs: further arguments of the function.
        timeout_s: time limit for one response in seconds.
        memory_mb: limit of the process's address space in MiB.
    """

    name: str
    kwargs: Mapping[str, Any]
    timeout_s: float = 60.0
    memory_mb: int | None = None

    def __call__(self, responses: Sequence[Response]) -> list[Any]:
        results = self._pool.run([_item(response) for response in responses])
        return [self._read(*pair) for pair in zip(results, responses)]

    @cached_property
    def _pool(self) -> WorkerPool:
        """One worker, so that the function keeps its state from one call to the next."""
        loader = f"{import_function.__module__}:load_in_worker"
        task = ScoringTask(loader, (self.name, dict(self.kwargs)), memory_mb=self.memory_mb)
        return WorkerPool(task, 1, self.timeout_s)

    def _read(self, result: Result, response: Response) -> Any:
        if result.outcome == SCORE:
            return {**json.loads(result.text), "score": result.score}
        if result.outcome == NO_SCORE:
            return FailedScore(no_score(result.text, response))
        how = {
            DIED: f"its process ended: {result.text}",
            NO_MEMORY: "it needs more than reward.memory_mb",
            TIMEOUT: f"it took longer than reward.timeout_s, {self.timeout_s:g} s, or the part of "
            "it that is left after other time-outs",
        }.get(result.outcome, result.text)
        message = (
            f"the reward function {self.name} failed on {describe(response.prompt)}, "
            f"response {shorten(response.text)!r}: {how}"
        )
        return FailedScore(message, result.unscored.reason if result.unscored else None)


def _item(response: Response) -> tuple[str, str, str, dict[str, Any]]:
    prompt = response.prompt
    return prompt.data_source, response.text, prompt.ground_truth, extra_info(prompt)


def extra_info(prompt: Prompt) -> dict[str, Any]:
    """Build the ``extra_info`` that the function gets for a data row.

    Returns:
        The row's column ``extra_info`` if it has one, as verl's rows do; otherwise its other
        columns and ``prompt``. A new dict at every call.
    """
    if "extra_info" in prompt.extra:
        own = prompt.extra["extra_info"]
        if own is None or isinstance(own, Mapping):
            return dict(own or {})
    return {**prompt.extra, "prompt": prompt.text}


def load_function(
    name: str, kwargs: Mapping[str, Any], timeout_s: float = 60.0, memory_mb: int | None = None
) -> FunctionReward:
    """Import the function of ``reward.function`` and check its signature before a worker starts.

    Args:
        name: ``module:function`` or ``path.py:function``.
        kwargs: further arguments of the function.
        timeout_s, memory_mb: as ``FunctionReward``.

    Raises:
        ConfigError: the function cannot be imported, or does not accept the arguments.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise _error(name, "no module and function", "write module:function or path.py:function")
    try:
        function = import_function(name)
    except Exception as error:
        why = f"importing {where} failed: {type(error).__name__}: {error}"
        raise _error(name, why, "correct the module, or its path") from error
    if not callable(function):
        raise _error(name, f"{where} has no function {attribute!r}", "name a function of it")
    given = dict.fromkeys(("data_source", "solution_str", "ground_truth", "extra_info"))
    try:
        inspect.signature(function).bind(**{**given, **kwargs})
    except TypeError as error:
        extra = f" and reward.kwargs {', '.join(kwargs)}" if kwargs else ""
        raise _error(
            name, f"its parameters do not fit: {error}", f"accept {SIGNATURE}{extra}"
        ) from error
    return FunctionReward(name, kwargs, timeout_s, memory_mb)


def _error(name: str, why: str, fix: str) -> ConfigError:
    return ConfigError([ConfigIssue("reward.function", name, why, fix)])

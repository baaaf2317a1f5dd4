"""Scores by a user's Python function."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mppo.batch import Prompt
from mppo.config.errors import ConfigError, ConfigIssue
from mppo.rewards.judgement import JudgingError, no_score
from mppo.rewards.response import Response, describe, shorten
from mppo.rewards.workers.pool import Result, WorkerPool
from mppo.rewards.workers.server import DIED, NO_SCORE, SCORE
from mppo.rewards.workers.user_function import import_function
from mppo.rewards.workers.worker import ScoringTask

SIGNATURE = "(data_source, solution_str, ground_truth, extra_info)"


@dataclass(frozen=True)
class FunctionJudge:
    """Calls a function once per response, in one process beside the trainer.

    Args:
        name: ``module:function`` or ``path.py:function``. The function takes ``data_source``,
            ``solution_str`` (the response), ``ground_truth`` and ``extra_info`` by name, and gives
            a number, or a dict with ``score`` and further numbers: the signature of verl's
            ``compute_score``.
        kwargs: passed along.
        timeout_s: seconds for one response, which scores 0 after that.
        memory_mb: address space of the process; a response that needs more scores 0.
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
        """One worker: what the function keeps between two calls, it finds again."""
        loader = f"{import_function.__module__}:load_in_worker"
        task = ScoringTask(loader, (self.name, dict(self.kwargs)), memory_mb=self.memory_mb)
        return WorkerPool(task, 1, self.timeout_s)

    def _read(self, result: Result, response: Response) -> Any:
        if result.happened == SCORE:
            return {**json.loads(result.text), "score": result.score}
        if result.happened == NO_SCORE:
            return JudgingError(no_score(result.text, response))
        if result.unscored is not None:
            return result.unscored
        how = "it ended its process: " if result.happened == DIED else ""
        return JudgingError(
            f"the reward function {self.name} failed on {describe(response.prompt)}, "
            f"response {shorten(response.text)!r}: {how}{result.text}"
        )


def _item(response: Response) -> tuple[str, str, str, dict[str, Any]]:
    prompt = response.prompt
    return prompt.data_source, response.text, prompt.ground_truth, extra_info(prompt)


def extra_info(prompt: Prompt) -> dict[str, Any]:
    """What a function sees of a row besides its answer.

    Returns:
        The row's own ``extra_info``, where it has that column, as verl's rows do; else its other
        columns and ``prompt``. A new dict at every call.
    """
    if "extra_info" in prompt.extra:
        own = prompt.extra["extra_info"]
        if own is None or isinstance(own, Mapping):
            return dict(own or {})
    return {**prompt.extra, "prompt": prompt.text}


def load_function(
    name: str, kwargs: Mapping[str, Any], timeout_s: float = 60.0, memory_mb: int | None = None
) -> FunctionJudge:
    """Try the function that ``reward.function`` names, before any process is started for it.

    Args:
        name: ``module:function`` or ``path.py:function``.
        kwargs: what the function gets besides the response.
        timeout_s, memory_mb: as ``FunctionJudge``.

    Raises:
        ConfigError: it cannot be imported, or does not take what it will be given.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise _error(name, "not of this form", "module:function or path.py:function")
    try:
        function = import_function(name)
    except Exception as error:
        why = f"importing {where} failed: {type(error).__name__}: {error}"
        raise _error(name, why, "mend the module, or the path") from error
    if not callable(function):
        raise _error(name, f"{where} has no function {attribute!r}", "the name of one it has")
    given = dict.fromkeys(("data_source", "solution_str", "ground_truth", "extra_info"))
    try:
        inspect.signature(function).bind(**{**given, **kwargs})
    except TypeError as error:
        extra = f" and reward.kwargs {', '.join(kwargs)}" if kwargs else ""
        raise _error(name, f"its parameters do not fit: {error}", SIGNATURE + extra) from error
    return FunctionJudge(name, kwargs, timeout_s, memory_mb)


def _error(name: str, why: str, fix: str) -> ConfigError:
    return ConfigError([ConfigIssue("reward.function", name, why, fix)])

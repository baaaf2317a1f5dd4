"""Scores from a Python function of the user, which runs in processes of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mppo.batch.prompt import Prompt
from mppo.rewards.response import Response, describe, shorten
from mppo.rewards.result import NoScore, RewardResult
from mppo.rewards.scores import FailedScore, no_score
from mppo.rewards.workers.named_code import imported_form
from mppo.rewards.workers.pool import Result, WorkerPool
from mppo.rewards.workers.user_function import (
    ONE_RESPONSE,
    FunctionForm,
    Item,
    calls_of,
    import_function,
)
from mppo.rewards.workers.worker import ScoringTask
from mppo.rewards.workers.worker_server import DIED, NO_MEMORY, NO_SCORE, SCORE, TIMEOUT
from mppo.safety.python_file import describe_error


@dataclass(frozen=True)
class FunctionReward:
    """Calls a function, ``module:function`` or ``path.py:function``, in ``workers`` processes of
    this rank, with one response or with several. It returns for each response a value that
    ``mppo.rewards.result`` reads. ``memory_mb`` limits a process's address space in MiB;
    ``batch_size`` the responses in one call, if the form allows several (None: an equal part of the
    responses for each process)."""

    name: str
    kwargs: Mapping[str, Any]
    form: FunctionForm = ONE_RESPONSE
    timeout_s: float = 60.0
    memory_mb: int | None = None
    workers: int = 1
    batch_size: int | None = None

    def __call__(self, responses: Sequence[Response]) -> list[Any]:
        per_call = 1
        if self.form.batched or self.form.is_async:
            per_call = self.batch_size or -(-len(responses) // self.workers) or 1
        results = self._pool.run([item_of(each, self.form) for each in responses], per_call)
        return [self._read(*pair) for pair in zip(results, responses)]

    @cached_property
    def _pool(self) -> WorkerPool:
        loader = f"{import_function.__module__}:load_in_worker"
        arguments = (self.name, dict(self.kwargs), self.form, self.timeout_s)
        task = ScoringTask(loader, arguments, memory_mb=self.memory_mb)
        # the worker cancels a coroutine itself; the process ends only if that does not help
        limit = self.timeout_s * (2 if self.form.is_async else 1)
        return WorkerPool(task, self.workers, limit)

    def _read(self, result: Result, response: Response) -> RewardResult | FailedScore:
        if result.outcome == SCORE:
            return RewardResult(result.score, *json.loads(result.text))
        if result.outcome == NO_SCORE:
            return FailedScore(no_score(result.text, response))
        how = {
            DIED: f"its process ended: {result.text}",
            NO_MEMORY: "it needs more than reward.memory_mb",
            TIMEOUT: f"it took longer than reward.timeout_s, {self.timeout_s:g} s, or the part of "
            "it that is left after other time-outs",
        }.get(result.outcome, result.text)
        reason = result.unscored.reason if result.unscored else None
        return FailedScore(_failure(self.name, response, how), reason)


@dataclass(frozen=True)
class CallableReward:
    """Calls a function (see ``FunctionReward``) of the program that started the run, in this
    process and without limits, except that a coroutine is cancelled after ``timeout_s`` seconds."""

    name: str
    function: Callable[..., Any]
    kwargs: Mapping[str, Any]
    form: FunctionForm
    timeout_s: float

    def __call__(self, responses: Sequence[Response]) -> list[Any]:
        if not (self.form.batched or self.form.is_async):
            return [result for each in responses for result in self._score([each])]
        return self._score(responses) if responses else []

    def _score(self, responses: Sequence[Response]) -> list[Any]:
        """The results of one call; if several responses share one that raised, of one for each."""
        items = [item_of(each, self.form) for each in responses]
        try:
            results = list(self._thread.submit(self._call, items).result())
        except NoScore as why:
            return [FailedScore(no_score(str(why), each)) for each in responses]
        except Exception as error:
            if len(responses) > 1:
                return [result for each in responses for result in self._score([each])]
            results = [error]
        return [
            FailedScore(_failure(self.name, each, describe_error(result)))
            if isinstance(result, BaseException)
            else result
            for result, each in zip(results, responses)
        ]

    @cached_property
    def _call(self) -> Callable[[Sequence[Item]], Sequence[Any]]:
        return calls_of(self.function, self.kwargs, self.form, self.timeout_s)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        # a notebook runs an event loop in the main thread
        return ThreadPoolExecutor(1, thread_name_prefix="reward")


def _failure(name: str, response: Response, how: str) -> str:
    return (
        f"the reward function {name} failed on {describe(response.prompt)}, "
        f"response {shorten(response.text)!r}: {how}"
    )


def item_of(response: Response, form: FunctionForm) -> Item:
    prompt, ids = response.prompt, list(response.token_ids) if form.takes_ids else []
    return prompt.data_source, response.text, prompt.ground_truth, extra_info(prompt), ids


def extra_info(prompt: Prompt) -> dict[str, Any]:
    """Build the ``extra_info`` for a data row, a new dict at every call: the row's column of that
    name if it has one, as verl's rows do; otherwise its other columns and ``prompt``."""
    if "extra_info" in prompt.extra:
        own = prompt.extra["extra_info"]
        if own is None or isinstance(own, Mapping):
            return dict(own or {})
    return {**prompt.extra, "prompt": prompt.text}


def load_function(name: str, kwargs: Mapping[str, Any], **settings: Any) -> FunctionReward:
    """Check the function of ``reward.function`` before a worker starts; raises as
    ``imported_form``."""
    return FunctionReward(name, kwargs, imported_form(name, kwargs), **settings)

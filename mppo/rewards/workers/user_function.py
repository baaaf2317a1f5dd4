"""Import of the user's reward function, its form, and its calls in a worker."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mppo.rewards.result import NoScore
from mppo.rewards.workers.worker import TooLong
from mppo.safety.python_file import import_file

ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Parameters of a function of one response, as of verl's ``compute_score``."""
MANY = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""Parameters of a function of several responses, as with verl's ``reward_manager: batch``."""
IDS = "response_ids"
"""A further parameter that a function may name: the tokens of the response, or of each one."""

Item = tuple[str, str, str, dict[str, Any], list[int]]
"""The values of the parameters for one response; the last one is that of ``IDS``."""


@dataclass(frozen=True)
class FunctionForm:
    """How a function is called: with lists of several responses (``batched``); as a coroutine
    function, with concurrent calls for several responses; with the parameter ``IDS``."""

    batched: bool = False
    is_async: bool = False
    takes_ids: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that it gets besides ``reward.kwargs``."""
        return (*(MANY if self.batched else ONE), *((IDS,) if self.takes_ids else ()))


ONE_RESPONSE = FunctionForm()


def form_of(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> FunctionForm:
    """Find the form of a function by its signature; TypeError if it accepts neither ``ONE`` nor
    ``MANY`` together with ``kwargs``."""
    signature = inspect.signature(function)
    called = (function, getattr(function, "__call__", None))  # noqa: B004  # an object's own
    is_async = any(map(inspect.iscoroutinefunction, called))
    takes_ids = IDS in signature.parameters and IDS not in kwargs
    forms = [FunctionForm(batched, is_async, takes_ids) for batched in (False, True)]
    problems = []
    for form in forms:
        try:
            signature.bind(**dict.fromkeys(form.parameters), **kwargs)
            return form
        except TypeError as error:
            problems.append(error)
    raise problems["solution_strs" in signature.parameters]


def import_function(name: str) -> Any:
    """Import ``module:function`` or ``path.py:function``; None if the module lacks the name. Raises
    any exception of the module's own code."""
    where, _, attribute = name.rpartition(":")
    if where.endswith(".py"):
        module = import_file(where, f"mppo_reward_{Path(where).stem}")
    else:
        module = importlib.import_module(where)
    return getattr(module, attribute, None)


def load_in_worker(
    name: str, kwargs: Mapping[str, Any], form: FunctionForm, timeout_s: float
) -> Callable[[Sequence[Item]], Sequence[Any]]:
    """Return the function as one of several items; a call of a coroutine function is cancelled
    after ``timeout_s`` seconds."""
    return calls_of(import_function(name), kwargs, form, timeout_s)


def calls_of(
    function: Callable[..., Any], kwargs: Mapping[str, Any], form: FunctionForm, timeout_s: float
) -> Callable[[Sequence[Item]], Sequence[Any]]:
    def call(items: Sequence[Item]) -> Any:
        columns: Sequence[Any] = [list(column) for column in zip(*items)]
        if not form.batched:
            columns = [column[0] for column in columns]
        return function(**dict(zip(form.parameters, columns)), **kwargs)

    if form.is_async:
        # one event loop for all calls: sessions and other objects bound to it stay usable
        run = asyncio.new_event_loop().run_until_complete
        return lambda items: run(_call_concurrently(call, items, form, timeout_s))
    if form.batched:
        return lambda items: _results(call(items), items)
    return lambda items: [call([item]) for item in items]


async def _call_concurrently(
    call: Callable[[Sequence[Item]], Any],
    items: Sequence[Item],
    form: FunctionForm,
    timeout_s: float,
) -> Sequence[Any]:
    """Await the calls; the result of one that takes too long, or raises, is its exception."""
    parts: list[Sequence[Item]] = [items] if form.batched else [[item] for item in items]
    tasks = [asyncio.ensure_future(call(part)) for part in parts]
    _, late = await asyncio.wait(tasks, timeout=timeout_s)
    for task in late:
        task.cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    found = [TooLong() if task in late else result for task, result in zip(tasks, found)]
    if not form.batched:
        return found
    if isinstance(found[0], BaseException):
        raise found[0]
    return _results(found[0], items)


def _results(found: Any, items: Sequence[Item]) -> Sequence[Any]:
    """The results of a batched call, one for each item; NoScore if it returned something else."""
    try:
        if isinstance(found, str | Mapping):
            raise TypeError
        results = list(found)
    except TypeError:
        kind = type(found).__name__
        raise NoScore(
            f"is missing: the function returned {kind}, not a list, for {len(items)} responses"
        ) from None
    return results

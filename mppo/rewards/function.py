"""Scores by a user's Python function."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mppo.batch import Prompt
from mppo.config.errors import ConfigError, Fault
from mppo.rewards.judgement import JudgingError
from mppo.rewards.response import Response, describe, shorten

SIGNATURE = "(data_source, solution_str, ground_truth, extra_info)"


@dataclass(frozen=True)
class FunctionJudge:
    """Calls a function once per response.

    Args:
        function: takes ``data_source``, ``solution_str`` (the response), ``ground_truth`` and
            ``extra_info`` by name, and gives a number, or a dict with ``score`` and further
            numbers: the signature of verl's ``compute_score``.
        name: as the recipe names it, for messages.
        kwargs: passed along.
    """

    function: Callable[..., Any]
    name: str
    kwargs: Mapping[str, Any]

    def __call__(self, responses: Sequence[Response]) -> list[Any]:
        return [self._judge(response) for response in responses]

    def _judge(self, response: Response) -> Any:
        prompt = response.prompt
        try:
            return self.function(
                data_source=prompt.data_source,
                solution_str=response.text,
                ground_truth=prompt.ground_truth,
                extra_info=extra_info(prompt),
                **self.kwargs,
            )
        except Exception as error:
            return JudgingError(
                f"the reward function {self.name} failed on {describe(prompt)}, "
                f"response {shorten(response.text)!r}: "
                f"{type(error).__name__}: {error}{_place(error)}"
            )


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


def load_function(name: str, kwargs: Mapping[str, Any]) -> FunctionJudge:
    """Import the function that ``reward.function`` names.

    Args:
        name: ``module:function`` or ``path.py:function``.
        kwargs: what the function gets besides the response.

    Raises:
        ConfigError: it cannot be imported, or does not take what it will be given.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise _error(name, "not of this form", "module:function or path.py:function")
    try:
        module = _import_file(where) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:
        why = f"importing {where} failed: {type(error).__name__}: {error}"
        raise _error(name, why, "mend the module, or the path") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise _error(name, f"{where} has no function {attribute!r}", "the name of one it has")
    given = dict.fromkeys(("data_source", "solution_str", "ground_truth", "extra_info"))
    try:
        inspect.signature(function).bind(**{**given, **kwargs})
    except TypeError as error:
        extra = f" and reward.kwargs {', '.join(kwargs)}" if kwargs else ""
        raise _error(name, f"its parameters do not fit: {error}", SIGNATURE + extra) from error
    return FunctionJudge(function, name, kwargs)


def _place(error: Exception) -> str:
    """Where in the function's own file it failed, however deep in a library that was."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the call above
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({own[-1].filename} line {own[-1].lineno})" if own else ""


def _import_file(path: str) -> Any:
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {file}")
    spec = importlib.util.spec_from_file_location(f"mppo_reward_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _error(name: str, why: str, cure: str) -> ConfigError:
    return ConfigError([Fault("reward.function", name, why, cure)])

"""Scores by a user's Python function."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mppo.config.errors import ConfigError, Fault
from mppo.rewards.response import Response, describe, shorten

SIGNATURE = "(data_source, solution_str, ground_truth, extra_info)"


@dataclass(frozen=True)
class FunctionJudge:
    """Calls a function once per response.

    Args:
        function: takes ``data_source``, ``solution_str`` (the response), ``ground_truth`` and
            ``extra_info`` (the row's other columns and ``prompt``) by name, and gives a number, or
            a dict with ``score``: the signature of verl's ``compute_score``.
        name: as the recipe names it, for messages.
        kwargs: passed along.
    """

    function: Callable[..., Any]
    name: str
    kwargs: Mapping[str, Any]

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        return [self._score(response) for response in responses]

    def _score(self, response: Response) -> float:
        prompt = response.prompt
        try:
            result = self.function(
                data_source=prompt.data_source,
                solution_str=response.text,
                ground_truth=prompt.ground_truth,
                extra_info={**prompt.extra, "prompt": prompt.text},
                **self.kwargs,
            )
        except Exception as error:
            raise ValueError(
                f"the reward function {self.name} failed on {describe(prompt)}, "
                f"response {shorten(response.text)!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return result["score"] if isinstance(result, Mapping) and "score" in result else result


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

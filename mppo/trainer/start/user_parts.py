"""What a Python program adds to the recipe of a run: a reward function, an agent, callbacks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mppo.recipe.errors import nearest
from mppo.safety.input_error import InputError
from mppo.safety.python_file import describe_error

if TYPE_CHECKING:  # it imports torch
    from mppo.batch.batch import Batch

_CALLS = {"on_step": 2, "on_batch": 1, "on_end": 0}
"""Methods of a callback, and how many arguments they get."""


class Callbacks:
    """Calls the user's callbacks on every rank, in the order given: ``on_step(step, metrics)``,
    ``on_batch(batch)``, ``on_end()``. InputError: an object has none, or other parameters."""

    def __init__(self, given: Sequence[object] = ()) -> None:
        self._given = tuple(given)
        for each in self._given:
            _check(each)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """After a step and its validation, before its checkpoint; each gets its own metrics."""
        for each in self._given:
            self._call(each, "on_step", step, dict(metrics))

    def on_batch(self, batch: Batch) -> None:
        """Before the update, with the scored batch; its ``[T]`` tensors are this rank's share."""
        for each in self._given:
            self._call(each, "on_batch", batch)

    def on_end(self) -> None:
        """After the last step and the export; not in a run that fails."""
        for each in self._given:
            self._call(each, "on_end")

    def _call(self, callback: object, name: str, *arguments: Any) -> None:
        method = getattr(callback, name, None)
        if method is None:
            return
        from mppo.supervision.phase import phase  # it imports torch

        try:
            with phase(name):
                method(*arguments)
        except Exception as error:
            where = f"{name} of the callback {_name(callback)}"
            raise InputError(f"{where} failed: {describe_error(error)}; correct it") from error


def _check(callback: object) -> None:
    found = {name for name in _CALLS if callable(getattr(callback, name, None))}
    wrong = {name for name in dir(callback) if name.startswith("on_")} - set(_CALLS)
    close = [guess for name in sorted(wrong) if (guess := nearest(name, _CALLS))]
    if not found or close:
        fix = f"did you mean {close[0]}?" if close else f"give it one of {', '.join(_CALLS)}"
        why = f"has {', '.join(sorted(wrong)) or 'no method of a callback'}"
        raise InputError(f"callbacks: {_name(callback)} {why}; {fix}")
    for name in found:
        if inspect.iscoroutinefunction(getattr(callback, name)):
            why = f"{name} of the callback {_name(callback)} is a coroutine function"
            raise InputError(f"{why}, which nothing would await; write it without async")
        try:
            inspect.signature(getattr(callback, name)).bind(*[None] * _CALLS[name])
        except TypeError as error:
            forms = "on_step(step, metrics), on_batch(batch), on_end()"
            why = f"{name} of the callback {_name(callback)} cannot be called: {error}"
            raise InputError(f"{why}; write {forms}") from error


def _name(callback: object) -> str:
    return getattr(callback, "__name__", type(callback).__name__)


@dataclass(frozen=True)
class UserParts:
    """What a Python program adds to a recipe; parts that are None are imported by their names."""

    reward: Callable[..., Any] | None = None
    agent: Callable[..., Any] | None = None
    callbacks: Callbacks = field(default_factory=Callbacks)

    def overrides(self) -> list[str]:
        found = []
        if self.reward is not None:
            found += ["reward.name=function", f"reward.function={_function_name(self.reward)}"]
        if self.agent is not None:
            found.append(f"rollout.agent.path={_function_name(self.agent)}")
        return found


NO_PARTS = UserParts()


def _function_name(function: Callable[..., Any]) -> str:
    """``module:name`` of a function, a class or a callable object."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"

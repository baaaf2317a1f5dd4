"""Functions and agents that a recipe names, imported in this process to look at their parameters.

It imports no torch: a recipe is checked before that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.rewards.workers.user_function import MANY, ONE, FunctionForm, form_of, import_function

KEY = "reward.function"


def checked_form(
    name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]
) -> FunctionForm:
    """The form of a reward function; ConfigError if it does not accept the arguments."""
    try:
        return form_of(function, kwargs)
    except TypeError as error:
        extra = f" and reward.kwargs {', '.join(kwargs)}" if kwargs else ""
        fix = f"accept ({', '.join(ONE)}), or lists as ({', '.join(MANY)}),{extra}"
        issue = ConfigIssue(KEY, name, f"its parameters do not fit: {error}", fix.rstrip(","))
        raise ConfigError([issue]) from error


def imported_form(name: str, kwargs: Mapping[str, Any]) -> FunctionForm:
    """The form of the function of ``reward.function``; ConfigError if it cannot be imported, or
    does not accept the arguments."""
    found = import_callable(KEY, name, "function", "name a function of it")
    return checked_form(name, found, kwargs)


def import_callable(key: str, name: str, noun: str, fix: str) -> Callable[..., Any]:
    """Import what the user names under a key of the recipe, as ``module:name`` or ``path.py:name``;
    ConfigError if it cannot be imported. ``noun`` is what is named, such as "function"; ``fix``
    what to do if the module lacks it."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        why, fix = f"no module and {noun}", f"write module:{noun} or path.py:{noun}"
        raise ConfigError([ConfigIssue(key, name, why, fix)])
    try:
        file = Path(where).expanduser()
        found = _imported(name, file.stat().st_mtime_ns if file.is_file() else 0)
    except (Exception, SystemExit) as error:
        why = f"importing {where} failed: {type(error).__name__}: {error}"
        issue = ConfigIssue(key, name, why, "correct the module, or its path")
        raise ConfigError([issue]) from error
    if not callable(found):
        raise ConfigError([ConfigIssue(key, name, f"{where} has no {noun} {attribute!r}", fix)])
    return found


@cache
def _imported(name: str, written_at: int) -> Any:
    """``import_function``; a file that has not changed is executed once, though a recipe's check
    and the run both ask for it."""
    del written_at
    return import_function(name)

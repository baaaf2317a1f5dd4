"""A row of the table of verl's keys: what happens to keys that mppo does not have.

A key is converted, ignored or refused. ``role_rows``, ``run_rows`` and ``engine_rows`` are the
table, ``translation`` applies it; ``mppo.recipe.other_systems`` has keys of which only the name
differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Converted:
    """The key is replaced by one of mppo's with the same effect.

    Args:
        key: mppo's key; ``*`` stands for the first part of verl's key, ``{}`` for its last.
        values: verl's values with mppo's; values that are absent stay as they are.
        function: from a number of verl's to mppo's; None: it stays.
    """

    key: str
    values: dict[Any, Any] = field(default_factory=dict, hash=False)
    function: Callable[[float], float] | None = None

    def target(self, parts: Sequence[str]) -> str:
        return self.key.replace("*", parts[0]).replace("{}", parts[-1])

    def convert(self, value: Any) -> Any:
        if self.function and isinstance(value, int | float):
            return self.function(value)
        return next((new for old, new in self.values.items() if old == value), value)


@dataclass(frozen=True)
class Ignored:
    """The key has no effect; the log says why."""

    why: str


@dataclass(frozen=True)
class Refused:
    """The key is an issue, with its why and fix."""

    why: str
    fix: str


@dataclass(frozen=True)
class VerlRow:
    """A pattern of keys and what happens to them, for any of ``values``.

    Names are dotted; ``{a,b}`` matches either, ``*`` any one part. A row also matches all keys
    below its names; the first row that matches a key and its value applies.
    """

    names: str
    action: Converted | Ignored | Refused
    values: tuple[Any, ...] | None = None


NOTHING = (None, False, 0, "", "null", "None", [], {})
"""Values that turn an option off."""

OFF = Ignored("the option is off, and mppo does not have it")
TEXT_ONLY = Ignored("prompts are text; images, video and audio are not supported")
NO_PROFILER = Ignored("trainer.profile chooses steps and ranks")
PROFILER = Refused(
    "has another form in mppo", "remove it; set trainer.profile.steps and trainer.profile.ranks"
)

"""What can become of a key of verl's that is neither one of this recipe nor another name for one.

It is converted, has no effect, or is refused. ``verl_role_rows`` and ``verl_run_rows`` are the
table, ``verl_keys`` applies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Converted:
    """The same wish under a key of ours.

    Args:
        key: the recipe's key; ``*`` is the first part of verl's, ``{}`` its last.
        values: verl's value to ours; a value not named here is kept.
    """

    key: str
    values: dict[Any, Any] = field(default_factory=dict, hash=False)

    def target(self, parts: Sequence[str]) -> str:
        """Our key for verl's."""
        return self.key.replace("*", parts[0]).replace("{}", parts[-1])

    def ours(self, value: Any) -> Any:
        """Our value for verl's."""
        return next((new for old, new in self.values.items() if old == value), value)


@dataclass(frozen=True)
class Ignored:
    """No effect; the log says so, and why."""

    why: str


@dataclass(frozen=True)
class Refused:
    """A fault: why, and what to do."""

    why: str
    fix: str


@dataclass(frozen=True)
class VerlRow:
    """What becomes of some keys.

    Args:
        names: dotted; ``{a,b}`` is either of two, ``*`` any one part. A row stands for everything
            below its name, too; the first one that fits a key and its value counts.
        fate: what becomes of them.
        values: the values this row is about; None: any.
    """

    names: str
    fate: Converted | Ignored | Refused
    values: tuple[Any, ...] | None = None


NOTHING = (None, False, 0, "", "null", "None", [], {})
"""Values that ask for nothing."""

OFF = Ignored("it is off, and there is no such option here")
NO_PROFILER = Ignored("there is no profiler of its own")
PROFILER = Refused("there is no profiler of its own", "remove it; run torchrun under nsys profile")

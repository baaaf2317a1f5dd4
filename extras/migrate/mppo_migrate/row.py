"""A row of the table of a system's flags, and the flags of a command.

A flag becomes one or several of mppo's keys, is used to compute others, or has no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Key:
    """The flag's value is the value of these keys.

    Args:
        names: mppo's keys.
        convert: from the flag's value to theirs.
    """

    names: tuple[str, ...]
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Operand:
    """The flag is used by the system's ``derive``, together with others.

    Args:
        default: the system's own value where the flag is not given; its type is the flag's.
    """

    default: Any = None


@dataclass(frozen=True)
class Without:
    """The flag has no counterpart, or none is needed.

    Args:
        why: for the comment in the recipe.
    """

    why: str


Row = Key | Operand | Without


def to(*names: str, convert: Callable[[Any], Any] | None = None) -> Key:
    """A row for a flag that becomes the keys ``names``."""
    return Key(names, convert) if convert else Key(names)


def when(*names: str, true: Any, false: Any = None) -> Key:
    """A row for a switch: the keys have one value if it is on, and another if it is off."""
    return Key(names, lambda value: true if value else false)


@dataclass(frozen=True)
class Setting:
    """A key of the recipe.

    Args:
        key: mppo's key.
        value: its value.
        origin: what it comes from, for the comment beside it.
        written: the flag as it is written, for messages.
    """

    key: str
    value: Any
    origin: str = ""
    written: str = ""

    @property
    def named(self) -> str:
        """The setting in a message."""
        return self.written or f"{self.key}={self.value}"


@dataclass
class Flags:
    """The flags of a command.

    Args:
        values: the value of each flag, parsed; True for one without a value.
        rows: the system's table.
        ranks: processes (GPUs) that the command starts.
        dotted: whether the command has flags with dots.
        program: the script or module that is started.
    """

    values: dict[str, Any]
    rows: Mapping[str, Row]
    ranks: int
    dotted: bool = False
    program: str = ""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """Flags whose value cannot be computed with, and why."""

    def __contains__(self, name: str) -> bool:
        return name in self.values and self.values[name] is not False

    def get(self, name: str) -> Any:
        """The flag's value, or the system's default where it is absent."""
        row = self.rows[name]
        assert isinstance(row, Operand), name
        if name not in self.values:
            return row.default
        value = self.values[name]
        if type(row.default) is int and not (type(value) is int and value > 0):
            self.problems.append((name, "is not a whole number above 0; the default is used"))
            return row.default
        return value


Derive = Callable[[Flags], Iterator[Setting]]
"""The settings that follow from several flags, or from none."""


@dataclass(frozen=True)
class System:
    """A system whose commands are migrated.

    Args:
        title: its name in texts.
        preset: the value of ``algorithm.preset`` with its defaults.
        programs: regular expressions of the programs' names: a script's path, or a module.
        rows: its flags.
        derive: what follows from several flags.
        extra: settings that the preset does not have, where no flag sets them.
        reward_model: the flag with the reward model.
        ranks: the processes of a command whose launcher does not give their number.
        others: regular expression of what starts the system's other trainers: a word, or two.
        dotted: flags with dots, and their older names, which ``derive`` uses.
    """

    title: str
    preset: str
    programs: Sequence[str]
    rows: Mapping[str, Row]
    derive: Derive
    reward_model: str
    extra: Sequence[Setting] = ()
    ranks: Callable[[Flags], int] | None = None
    others: str | None = None
    dotted: Mapping[str, str] = field(default_factory=dict)

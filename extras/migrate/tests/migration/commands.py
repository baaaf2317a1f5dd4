"""Read ``commands.txt``: the commands that are migrated in the tests."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class MigratedCommand(NamedTuple):
    """A command of ``commands.txt``: its system, the arguments of the script, and its text."""

    system: str
    arguments: list[str]
    text: str


def _read() -> dict[str, MigratedCommand]:
    found = {}
    for part in (HERE / "commands.txt").read_text().split("\n== ")[1:]:
        head, _, text = part.partition("\n")
        name, _, rest = head.partition(": ")
        system, *arguments = rest.split()
        found[name] = MigratedCommand(system, arguments, text)
    return found


COMMANDS = _read()

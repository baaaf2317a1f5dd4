"""Read ``flags.txt`` and ``scripts.txt``: verl's flags, and their meaning in mppo."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mppo_migrate.verl_keys.translation import VerlTranslation

from mppo.recipe.document import apply_overrides

HERE = Path(__file__).parent
ACCEPTED, CONVERTED, IGNORED, REFUSED = "accepted", "converted", "ignored", "refused"


class Flag(NamedTuple):
    """A row of ``flags.txt``.

    Args:
        fate: one of the four words above.
        setting: as verl's user writes it.
        words: our key, our key and value, or words of the reason.
    """

    fate: str
    setting: str
    words: str

    @property
    def name(self) -> str:
        return self.setting.partition("=")[0]


def read_flags() -> tuple[list[Flag], list[Flag]]:
    """The flags of the sixteen scripts, and other flags."""
    found: list[list[Flag]] = []
    for line in (HERE / "flags.txt").read_text().splitlines():
        if line.startswith("# flags"):
            found.append([])
        elif line and not line.startswith("#"):
            fate, rest = line.split(maxsplit=1)
            found[-1].append(Flag(fate, *map(str.strip, rest.split("  |  "))))
    scripts, others = found
    return scripts, others


def read_scripts(file: str = "scripts.txt") -> dict[str, list[str]]:
    """The settings of each script, by script name."""
    found: dict[str, list[str]] = {}
    for line in (HERE / file).read_text().splitlines():
        if line.startswith("run_"):
            settings = found[line] = []
        elif line.startswith(" "):
            settings.append(line.strip())
    return found


SCRIPT_FLAGS, OTHER_FLAGS = read_flags()


def translate_settings(settings: list[str]) -> VerlTranslation:
    """What becomes of settings ``key=value`` of verl."""
    document, issues = apply_overrides({}, settings)
    assert not issues
    return VerlTranslation(document)

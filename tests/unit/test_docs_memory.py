"""The worked example of docs/memory.md: its commands print what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from mppo.planning.verdict import EXIT_TOO_LARGE
from mppo.train import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "memory.md"
PROGRAM = ["python", "mppo/train.py"]


class Shown(NamedTuple):
    """A command of the page, and the lines below it."""

    command: str
    lines: list[str]


def shown() -> list[Shown]:
    """The commands with an output, with the page's shell variables filled in."""
    found: list[Shown] = []
    variables: dict[str, str] = {}
    is_output = False

    def filled(text: str) -> str:
        return re.sub(r"\$(\w+)", lambda name: variables[name[1]], text)

    for line in PAGE.read_text().splitlines():
        text = line.removeprefix("    ").rstrip()
        if setting := re.fullmatch(r'\$ (\w+)="(.*)"', text):
            variables[setting[1]] = filled(setting[2])
        elif text.startswith("$ "):
            found.append(Shown(filled(text[2:]), []))
            is_output = True
        elif text and not line.startswith("    "):
            is_output = False
        elif text and is_output:
            found[-1].lines.append(text)
    return found


def texts_of(picture: Path) -> list[str]:
    """The words of a picture: phases, parts, title, and the numbers of its scale."""
    return re.findall(r"<text [^>]*>([^<]*)</text>", picture.read_text())


@pytest.mark.parametrize("one", shown(), ids=lambda one: one.command[-60:])
def test_a_command_prints_what_the_page_shows(one, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = shlex.split(one.command)
    assert words[:2] == PROGRAM
    picture = None
    if "--picture" in words:
        place = words.index("--picture") + 1
        words[place], picture = str(tmp_path / "drawn.svg"), ROOT / words[place]
    code = main(words[2:])
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    left = iter(printed)
    missing = [line for line in one.lines if line not in left]
    assert not missing, "\n".join(["not printed, or in another order:", *missing, "", *printed])
    text = "\n".join(one.lines)
    lacks = "does NOT fit" in text or "fix:" in text
    assert code == (EXIT_TOO_LARGE if lacks else 0)
    if picture is not None:
        assert texts_of(tmp_path / "drawn.svg") == texts_of(picture)


def test_the_page_has_its_example():
    assert [len(one.lines) for one in shown()] == [17, 28, 6, 8, 3]

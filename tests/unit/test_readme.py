"""The README links every document and shows the pictures that it names."""

from __future__ import annotations

import re
from pathlib import Path

from mppo.parallel.layout import Layout

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def test_every_document_is_linked():
    pages = {f"docs/{page.name}" for page in ROOT.glob("docs/*.md")} - {"docs/index.md"}
    assert pages - set(re.findall(r"\]\((docs/\w+\.md)", TEXT)) == set()


def test_it_shows_the_timeline_a_report_and_the_site():
    pictures = re.findall(r"!\[[^\]]+\]\((\S+)\)", TEXT)
    assert {Path(name).stem.split("_")[0] for name in pictures} == {"timeline", "report", "landing"}
    assert all((ROOT / name).stat().st_size > 1000 for name in pictures)


def test_the_page_of_what_was_run_names_tests_that_exist():
    page = (ROOT / "docs/what_was_run.md").read_text()
    named = re.findall(r"`(?:tests/\w+/)?(test_\w+\.py)`", page)
    assert len(named) > 20
    for name in named:
        assert [*ROOT.glob(f"tests/*/{name}"), *ROOT.glob(f"extras/*/tests/{name}")], name


def test_it_shows_the_loop_as_it_is():
    """Every line of README's excerpt is one of the loop's, in its order."""
    (excerpt,) = re.findall(r"# of mppo/trainer/loop\.py\n(.*?)```", TEXT, re.DOTALL)
    lines = iter((ROOT / "mppo/trainer/loop.py").read_text().splitlines())
    for line in excerpt.splitlines():
        assert line.strip() == "..." or line in lines, line


def test_it_says_what_is_supported_in_eight_rows():
    table = TEXT.partition("## What is supported")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\| \w.* \|$", table, re.MULTILINE)) == 8


def test_the_picture_of_layouts_shows_the_ranks_of_megatrons_order():
    text = (ROOT / "docs/images/roles_and_layouts.svg").read_text()
    cells = re.findall(
        r'<rect x[^>]* fill="(#\w+)"/>\n<text[^>]*>((?:PP\d ?)?(?:TP\d)?)</text>', text
    )
    layouts = [
        Layout(8, tp=2, pp=2),
        Layout(8, tp=4),
        Layout(8, pp=4),
        Layout(8, tp=2),
        Layout(8, tp=4),
    ]
    assert len(cells) == 8 * len(layouts)
    for row, layout in enumerate(layouts):
        mine = cells[8 * row : 8 * row + 8]
        places = [layout.coordinates(rank) for rank in range(8)]
        named = {"PP": layout.pp > 1, "TP": layout.tp > 1}
        assert [label for _, label in mine] == [
            " ".join(f"{n}{getattr(p, n.lower())}" for n in named if named[n]) for p in places
        ]
        colours = {(place.dp, colour) for place, (colour, _) in zip(places, mine)}
        assert len(colours) == layout.dp, "one colour for each copy"

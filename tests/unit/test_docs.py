"""README and docs: links lead somewhere, the site builds. ``tests/pages`` runs what pages show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from line_links import corrected

from mppo.recipe.reference import recipe_reference

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if file.suffix == ".py":
            continue
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_to_lines_lead_to_the_functions_they_name(page):
    assert page.read_text() == corrected(page), "run: make format"


def test_the_reference_of_recipe_keys_equals_the_code():
    assert (ROOT / "docs/recipe_reference.md").read_text() == recipe_reference(), "run: make schema"


def test_the_site_builds_without_a_warning(tmp_path):
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", ROOT / "docs", tmp_path]
    run = subprocess.run(build, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    page = (tmp_path / "schedule.html").read_text()
    loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?:[^\"]+)", page)
    assert not loaded, "a page loads nothing from the network"

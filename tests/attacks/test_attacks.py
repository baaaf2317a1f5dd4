"""Every row of the attacks' tables as the user who runs the tests, and the generated page."""

from __future__ import annotations

from pathlib import Path

import pytest
from attacks.document import document
from attacks.row_check import ROWS, check
from attacks.server import attack_server

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server():
    with attack_server(as_nobody=False) as server:
        yield server


@pytest.mark.parametrize(("table", "row"), ROWS, ids=str)
def test_a_hostile_input_is_refused_in_time_and_changes_nothing(server, table, row):
    check(server, table, row)


def test_the_page_is_generated_from_the_tables():
    assert (ROOT / "docs/attacks.md").read_text() == document(), "run: make attacks"


def test_the_tables_hold_a_hundred_attacks():
    assert len(ROWS) >= 100

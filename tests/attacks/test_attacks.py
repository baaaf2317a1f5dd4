"""Every row of the attacks' tables as the user who runs the tests, and the generated page."""

from __future__ import annotations

from pathlib import Path

from attacks.document import document
from attacks.row_check import ROWS, check, every_row

ROOT = Path(__file__).parents[2]
AS_NOBODY = False


@every_row
def test_a_hostile_input_is_refused_in_time_and_changes_nothing(server, table, row):
    check(server, table, row)


def test_the_page_is_generated_from_the_tables():
    assert (ROOT / "docs/attacks.md").read_text() == document(), "run: make attacks"


def test_the_tables_hold_a_hundred_attacks():
    assert len(ROWS) >= 100

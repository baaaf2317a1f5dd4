"""Every row of the attacks' tables as an ordinary user, where root runs the tests."""

from __future__ import annotations

import os

import pytest
from attacks.row_check import check, every_row

pytestmark = pytest.mark.skipif(
    os.getuid() != 0,
    reason="only root can become another user; test_attacks.py ran as an ordinary user already",
)
AS_NOBODY = True


@every_row
def test_a_hostile_input_is_refused_in_time_and_changes_nothing(server, table, row):
    check(server, table, row)

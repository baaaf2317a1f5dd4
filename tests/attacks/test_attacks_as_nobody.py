"""The rows of the attacks' tables whose result may depend on the user, as an ordinary user, where
root runs the tests."""

from __future__ import annotations

import os

import pytest
from attacks.row_check import check, rows_by_user

pytestmark = pytest.mark.skipif(
    os.getuid() != 0,
    reason="only root can become another user; test_attacks.py ran as an ordinary user already",
)
AS_NOBODY = True


@rows_by_user
def test_a_hostile_input_is_refused_in_time_and_changes_nothing(server, table, row):
    check(server, table, row)

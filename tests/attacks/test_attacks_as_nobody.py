"""Every row of the attacks' tables as an ordinary user, where root runs the tests."""

from __future__ import annotations

import os

import pytest
from attacks.row_check import ROWS, check
from attacks.server import attack_server

pytestmark = pytest.mark.skipif(
    os.getuid() != 0,
    reason="only root can become another user; test_attacks.py ran as an ordinary user already",
)


@pytest.fixture(scope="module")
def server():
    with attack_server(as_nobody=True) as server:
        yield server


@pytest.mark.parametrize(("table", "row"), ROWS, ids=str)
def test_a_hostile_input_is_refused_in_time_and_changes_nothing(server, table, row):
    check(server, table, row)

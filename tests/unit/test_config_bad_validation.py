"""A best checkpoint that no validation can choose is one issue, with key, value, why and fix."""

from __future__ import annotations

import pytest
from bad_recipe import GOOD, assert_one_fault, refusal

# name, settings, key, message
ROWS = [
    ("a best of no validation", "trainer.best_metric=val/reward trainer.save_freq=5",
     "trainer.best_metric", "set trainer.test_freq"),
    ("a best of steps that are not validated",
     "trainer.best_metric=-val-core/x/reward/mean trainer.save_freq=5 trainer.test_freq=10",
     "trainer.best_metric", "to a multiple of it"),
    ("a number for a folder", "trainer.validation_data_dir=3", "trainer.validation_data_dir",
     "valid string"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "key", "expected"), [row[1:] for row in ROWS],
                         ids=[row[0] for row in ROWS])  # fmt: skip
def test_a_validation_that_is_not_possible_is_one_issue(settings, key, expected, tmp_path, capsys):
    assert_one_fault(refusal(tmp_path, capsys, GOOD, settings), key, expected)

"""Bad settings of dumps, replays and profiles: each gives one clear message and exit code 2."""

from __future__ import annotations

import pytest
from bad_recipe import GOOD, assert_one_fault, refusal

ROWS = [
    ("a dump that is a path", "trainer.dump_rollouts=/data", "trainer.dump_rollouts", "boolean"),
    ("a replay of nothing", "trainer.replay=nowhere", "trainer.replay", "does not exist"),
    ("a replay of a folder without dumps", "trainer.replay=.", "trainer.replay",
     "holds no complete step_N"),
    ("a profile of step 0", "trainer.profile.steps=[0]", "trainer.profile.steps.0", "a value > 0"),
    ("a profile of a rank that is not there", "trainer.profile.steps=[1] "
     "trainer.profile.ranks=[0,7]", "trainer.profile.ranks", "has the ranks 0 to 0"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "key", "expected"), [row[1:] for row in ROWS],
                         ids=[row[0] for row in ROWS])  # fmt: skip
def test_a_bad_setting_is_one_issue(settings, key, expected, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_one_fault(refusal(tmp_path, capsys, GOOD, settings), key, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"], "nothing was run"

"""Every mistake in a recipe gives one clear message and exit code 2, and nothing is run.

Nothing heavy is imported either, unless a model must be read.
"""

from __future__ import annotations

import re

import pytest
from bad_recipe import (
    GOOD,
    arguments_of,
    assert_one_fault,
    assert_refused,
    refusal,
    write_files,
)
from bad_recipes import layouts, rewards, runs, settings
from light_programs import LightPrograms

from mppo.train import main
from mppo.trainer.start.loading import load_checked

TABLES = (settings.SETTINGS, runs.AGENTS, runs.CODE, runs.OFFLOAD, runs.VALIDATION, runs.DUMPS,
          rewards.REWARD_MODELS, rewards.REWARD_SERVERS)  # fmt: skip
ROWS = [
    *((*row, GOOD, ()) for table in TABLES for row in table),
    *((*row, GOOD, ("--dry-run", "--world-size", "4")) for row in layouts.LAYOUTS),
    *((name, "", key, says, text, ()) for name, text, key, says in settings.DOCUMENTS),
]
"""Name, settings, key, message, the recipe and options of the program."""


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("places"))


@pytest.fixture(scope="module")
def programs(places):
    with LightPrograms() as found:
        yield found


@pytest.mark.parametrize(
    ("given", "key", "expected", "text", "options"),
    [row[1:] for row in ROWS],
    ids=[row[0] for row in ROWS],
)
def test_a_mistake_is_one_issue_and_nothing_is_run(
    given, key, expected, text, options, tmp_path, capsys, places, programs, monkeypatch
):
    given = re.sub(r"\{(\w+)\}", lambda name: str(places.get(name[1], name[0])), given)
    folder, out = tmp_path / "folder", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    told = programs.run("mppo-train", arguments_of(folder, text, given, *options), folder, out)
    if told.must_read_a_model:
        monkeypatch.chdir(folder)
        message = refusal(folder, capsys, text, given, *options)
    else:
        assert_refused(*told)
        message = told.err
    assert_one_fault(message, key, expected)
    assert [path.name for path in folder.iterdir()] == ["recipe.yaml"]


def test_an_agent_that_cannot_be_imported_ends_a_run_before_its_first_step(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD)
    keys = ["rollout.agent.path=no_such:agent", f"trainer.default_local_dir={tmp_path}/run"]
    assert main(["--config", str(path), *keys]) == 2
    assert_one_fault(capsys.readouterr().err, "rollout.agent.path", "No module named 'no_such'")
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def test_the_good_recipe_has_no_issue(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD)
    assert load_checked(path, [], 1).trainer.experiment_name == "spoilt"


def test_a_missing_recipe_is_reported(tmp_path, capsys):
    assert main(["--config", str(tmp_path / "nowhere.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_all_issues_are_reported_together(tmp_path, capsys):
    wrong = "actor.ppo_mini_batch_size=3 rollout.temperature=0 actor.lr=1 data.seed=x"
    message = refusal(tmp_path, capsys, GOOD, wrong)
    assert ": 4 issues" in message

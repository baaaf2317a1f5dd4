"""Bad recipes with an agent: each gives one clear message and exit code 2."""

from __future__ import annotations

import pytest
from bad_recipe import GOOD, assert_one_fault, refusal, write_files

from mppo.train import main

# one setting too many: name, override, key, message
SETTINGS = [
    ("an agent without a path", "rollout.agent.max_turns=3", "rollout.agent.path", "required"),
    ("an agent's file that is missing", "rollout.agent.path=no.py:agent", "rollout.agent.path",
     "no such file no.py"),
    ("aborted conversations", "rollout.agent.path=a:b rollout.name=sglang "
     "rollout.over_sampling=0.25", "rollout.over_sampling", "state is not kept"),
    ("conversations ahead", "rollout.agent.path=a:b rollout.name=sglang "
     "rollout.mode=disaggregated rollout.sync=disk rollout.urls=[http://h:1] "
     "algorithm.rollout_correction.rollout_is=token trainer.rollout_ahead=1",
     "trainer.rollout_ahead", "turns of a conversation follow each other"),
    ("conversations for a reward model", "rollout.agent.path=a:b "
     "reward_model.path=builtin:tiny-reward", "reward_model.path", "not a conversation"),
    ("tools in prompts without a template", "rollout.agent.path=a:b "
     "rollout.agent.tools=[{{\"path\":\"c:d\",\"name\":\"e\"}}] data.apply_chat_template=false",
     "rollout.agent.tools", "no prompt would name"),
    ("two tools of one name", "rollout.agent.path=a:b "
     "rollout.agent.tools=[{{\"path\":\"c:d\",\"name\":\"e\"}},{{\"path\":\"f:g\",\"name\":\"e\"}}]",
     "rollout.agent.tools", "two tools have one name"),
    ("experts of an engine over turns", "rollout.agent.path=a:b model.path=builtin:tiny-moonlight "
     "rollout.name=sglang actor.router_replay=R3", "actor.router_replay", "not collected over"),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("places"))


@pytest.mark.parametrize(
    ("settings", "key", "expected"), [row[1:] for row in SETTINGS], ids=[r[0] for r in SETTINGS]
)
def test_a_mistake_is_one_issue_and_nothing_is_run(
    settings, key, expected, tmp_path, capsys, places, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    message = refusal(tmp_path, capsys, GOOD, settings.format(**places))
    assert_one_fault(message, key, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_an_agent_that_cannot_be_imported_ends_a_run_before_its_first_step(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD)
    keys = ["rollout.agent.path=no_such:agent", f"trainer.default_local_dir={tmp_path}/run"]
    assert main(["--config", str(path), *keys]) == 2
    shown = capsys.readouterr().err
    assert_one_fault(shown, "rollout.agent.path", "No module named 'no_such'")
    assert not (tmp_path / "run" / "recipe.yaml").exists()

"""Faults of data, code and tools that a dry run tells, together and before anything is started."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from mppo.batch.prompt import Prompt
from mppo.recipe.errors import ConfigError
from mppo.recipe.load import load_recipe
from mppo.recipe.sections.reward import RewardConfig
from mppo.rewards.rules import RuleReward
from mppo.rewards.scorer import Scorer
from mppo.train import main
from mppo.trainer.start import user_code
from mppo.trainer.start.user_code import odd_values, row_issues

ROW = {"prompt": "1+1=", "answer": "2"}


def faults(tmp_path, row, *keys, size: int = 1) -> list[tuple[str, str]]:
    """Key and reason of the issues of a file with one row, and batches of ``size``."""
    file = tmp_path / "mine.jsonl"
    file.write_text(row if isinstance(row, str) else json.dumps(row) + "\n")
    batches = [f"data.train_batch_size={size}", f"actor.ppo_mini_batch_size={size}"]
    given = [f"data.train_files=[{file}]", "model.path=builtin:tiny", *batches, *keys]
    recipe = load_recipe(None, given)
    return [(issue.key, issue.why) for issue in row_issues(recipe)]


@pytest.mark.parametrize(
    ("row", "keys", "key", "why"),
    [
        ({"question": "1+1=", "answer": "2"}, (), "mine.jsonl line 1", "no key 'prompt'; the row"),
        ({"prompt": ""}, (), "mine.jsonl line 1", "'prompt' is an empty text"),
        (ROW, (), "reward.verifier", "no verifier is known for the data source 'mine'"),
        (ROW, ("data.answer_key=label",), "mine.jsonl line 1", "no key 'label'"),
    ],
)
def test_the_first_row_shows_what_a_file_lacks(row, keys, key, why, tmp_path):
    ((found, reason),) = faults(tmp_path, row, *keys)
    assert found.endswith(key)
    assert reason.startswith(why)


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        (ROW, ("reward.verifier=gsm8k",)),
        ({**ROW, "data_source": "openai/gsm8k"}, ()),
        (ROW, ("reward.name=function", "reward.function=mine.py:score")),
        (ROW, ("rollout.agent.path=mine.py:agent",)),
        ({"question": "1+1=", "answer": "2"}, ("data.prompt_key=question", "reward.verifier=math")),
        (ROW, ("data.val_files=[elsewhere.jsonl]", "reward.verifier=gsm8k")),
        (ROW, (f"data.val_files=[{__file__}]", "data.val_size=0", "reward.verifier=gsm8k")),
    ],
)
def test_a_usable_row_and_files_that_are_elsewhere_are_no_faults(row, keys, tmp_path):
    assert faults(tmp_path, row, *keys) == []


def test_small_files_are_read_entirely_and_long_ones_by_their_first_row(tmp_path, monkeypatch):
    two, math = json.dumps(ROW) + "\n" + '{"prompt": "1+1="\n', "reward.verifier=math"
    ((key, why),) = faults(tmp_path, two, math)
    assert key.endswith("mine.jsonl line 2")
    assert why.startswith("not valid JSON")
    ((key, why),) = faults(tmp_path, ROW, math, size=8)
    assert key == "data.train_batch_size"
    assert why.startswith("a batch would repeat prompts: there are only 1 in ")
    monkeypatch.setattr(user_code, "_SMALL", 10)
    assert faults(tmp_path, two, math, size=8) == []


def test_values_that_are_most_likely_mistakes_are_named():
    keys = ["data.train_files=[a.jsonl]", "data.val_files=[a.jsonl,b.jsonl]", "actor.optim.lr=10"]
    files, rate = odd_values(load_recipe(None, keys))
    assert files.startswith("data.val_files: a.jsonl is a training file too")
    assert rate.startswith("actor.optim.lr = 10: Adam moves a weight")
    assert not [*odd_values(load_recipe(None, [keys[0], "data.val_files=[b.jsonl]"]))]


def test_with_an_agent_a_data_source_needs_no_verifier():
    """The agent may give all scores."""
    prompt = Prompt(0, (3, 4), "mine", "2", "1+1=")
    tokenizer: Any = None
    scorer = Scorer(RuleReward(), tokenizer, RewardConfig())
    replace(scorer, has_agent=True).check([prompt])
    with pytest.raises(ConfigError, match="no verifier is known"):
        scorer.check([prompt])


def test_a_dry_run_tells_faults_of_data_reward_and_tools_in_one_round(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1="}\n')
    (tmp_path / "reward.py").write_text("def score(answer): return 1.0\n")
    tool = '{path: "mppo.agents.tools:calculate", name: c, parameters: {properties: {expr: {}}}}'
    keys = [
        "model.path=builtin:tiny", f"data.train_files=[{tmp_path}/rows.jsonl]",
        "reward.name=function", f"reward.function={tmp_path}/reward.py:score",
        "rollout.agent.path=mppo.agents.hermes:HermesAgent", f"rollout.agent.tools=[{tool}]",
        "data.apply_chat_template=true", "data.max_prompt_length=16", "data.max_response_length=16",
    ]  # fmt: skip
    assert main(["--dry-run", *keys]) == 2
    shown = capsys.readouterr().err
    assert "no key 'prompt'" in shown
    assert "reward.function" in shown
    assert "its parameters are expression" in shown

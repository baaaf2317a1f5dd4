"""Bad recipes with a reward model: each gives one clear message and exit code 2."""

from __future__ import annotations

import pytest
from bad_recipe import GOOD, assert_one_fault, refusal, write_files

REWARDED = "reward_model.path=builtin:tiny-reward"
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"

# one setting too many: name, override, key, message
SETTINGS = [
    ("a reward model without a model", "reward_model.enable=true", "reward_model.path",
     "reward_model.enable = true needs it"),
    ("a key of no reward model", "reward_model.clip=5", "reward_model.clip",
     "no effect without reward_model.path"),
    ("a normalisation of no reward model", "reward_model.normalize.mode=measured",
     "reward_model.normalize", "no effect without reward_model.path"),
    ("a weight of the only score", "reward.weight=0.5", "reward.weight",
     "no effect without a reward model"),
    ("a reward model of verl that is refused", f"{REWARDED} reward_model.micro_batch_size=4",
     "reward_model.micro_batch_size", "set reward_model.micro_batch_size_per_gpu"),
    ("an unknown key of the reward model", f"{REWARDED} reward_model.clipp=1",
     "reward_model.clipp", "did you mean reward_model.clip?"),
    ("a verifier without a weight", f"{REWARDED} reward.verifier=exact", "reward.verifier",
     "set reward.weight"),
    ("a server without a weight",
     f"{REWARDED} reward.name=remote reward.url=http://localhost:8000/score", "reward.name",
     "set reward.weight"),
    ("a weighted rule without answers", f"{REWARDED} reward.weight=1 data.task=null "
     "data.train_files=[{file}] data.answer_key=null", "data.answer_key",
     "compares responses with the ground truth"),
    ("a mean that nothing reads", f"{REWARDED} reward_model.normalize.mean=1",
     "reward_model.normalize.mean", "set the mode to given"),
    ("a deviation of zero", f"{REWARDED} reward_model.normalize.std=0",
     "reward_model.normalize.std", "a value > 0"),
    ("a config without moments", f"{REWARDED} reward_model.normalize.mode=config",
     "reward_model.normalize.mode", "config.json of the reward model has mean = None"),
    ("a text longer than the positions", f"{REWARDED} reward_model.max_length=513",
     "reward_model.max_length", "more than the model's 512 positions"),
    ("a language model for a reward model", "reward_model.path=builtin:tiny",
     "reward_model.path", "a language model without a score head"),
    ("no such reward model", "reward_model.path=nowhere/reward", "reward_model.path",
     "no such folder"),
    ("a reward model of an unknown family", "reward_model.path={alien}", "reward_model.path",
     "is not supported"),
    ("a reward model with three labels", "reward_model.path={three_labels}", "reward_model.path",
     "a Qwen2ForSequenceClassification with 3 labels"),
    ("a reward model without a head", "reward_model.path={headless}", "reward_model.path",
     "has no score head"),
    ("a dtype the reward model cannot have", f"{REWARDED} reward_model.dtype=int8",
     "reward_model.dtype", "choose one of: float32, bfloat16"),
]  # fmt: skip

# layouts on four ranks: name, overrides, key, message
LAYOUTS = [
    ("a reward model's world not a multiple", f"{REWARDED} reward_model.megatron.{PP}=2 "
     f"reward_model.megatron.{TP}=4", "reward_model.megatron", "world size 4 is not a multiple"),
    ("a reward model's heads not divisible", "reward_model.path={nine_heads} "
     f"reward_model.megatron.{TP}=2", f"reward_model.megatron.{TP}",
     "does not divide the 9 attention heads (reward_model.path)"),
    ("a reward model's layers not divisible", "reward_model.path={three_layers} "
     f"reward_model.megatron.{PP}=2", f"reward_model.megatron.{PP}",
     "3 layers do not divide evenly among 2 stages (reward_model.path)"),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("places"))


ROWS = [
    *((*row, ()) for row in SETTINGS),
    *((*row, ("--dry-run", "--world-size", "4")) for row in LAYOUTS),
]


@pytest.mark.parametrize(
    ("settings", "key", "expected", "options"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS]
)
def test_a_mistake_is_one_issue_and_nothing_is_run(
    settings, key, expected, options, tmp_path, capsys, places, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    message = refusal(tmp_path, capsys, GOOD, settings.format(**places), *options)
    assert_one_fault(message, key, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]

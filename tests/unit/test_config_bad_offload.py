"""Every malformed or impossible offload is one issue, with key, value, why and fix."""

from __future__ import annotations

import pytest
from bad_recipe import GOOD, assert_one_fault, refusal

# name, settings, key, message
ROWS = [
    ("an unknown word", "actor.megatron.offload=some", "actor.megatron.offload",
     "choose one of: auto, none; or give its keys"),
    ("true", "actor.megatron.offload=true", "actor.megatron.offload",
     "choose one of: auto, none; or give its keys"),
    ("an unknown part", "critic.megatron.offload.params=true",
     "critic.megatron.offload.params", "did you mean critic.megatron.offload.parameters?"),
    ("a word for a part", "critic.megatron.offload.optimizer=maybe",
     "critic.megatron.offload.optimizer", "valid boolean"),
    ("gradients of a reference", "algorithm.use_kl_in_reward=true "
     "ref.megatron.offload.gradients=true", "ref.megatron.offload.gradients",
     "the reference is not trained"),
    ("an optimizer of a reference", "algorithm.use_kl_in_reward=true "
     "ref.megatron.offload.optimizer=true", "ref.megatron.offload.optimizer",
     "offload.parameters moves its weights"),
    ("an optimizer of a reward model", "reward_model.path=builtin:tiny-reward "
     "reward_model.megatron.offload.optimizer=true", "reward_model.megatron.offload.optimizer",
     "the reward model is not trained: it has no optimizer"),
    ("verl's offload of a reference's optimizer", "ref.megatron.optimizer_offload=true",
     "ref.megatron.optimizer_offload", "param_offload moves its weights"),
    ("a hybrid optimizer that is not distributed",
     "actor.megatron.use_distributed_optimizer=false actor.optim.cpu_offload_fraction=0.5",
     "actor.optim.cpu_offload_fraction", "the hybrid optimizer needs the distributed one"),
    ("more than all moments", "critic.optim.cpu_offload_fraction=1.5",
     "critic.optim.cpu_offload_fraction", "a value <= 1"),
    ("an offload given in two ways", "actor.megatron.param_offload=true "
     "actor.megatron.offload.parameters=false", "actor.megatron.param_offload",
     "also given as False"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "key", "expected"), [row[1:] for row in ROWS],
                         ids=[row[0] for row in ROWS])  # fmt: skip
def test_an_offload_that_is_not_possible_is_one_issue(settings, key, expected, tmp_path, capsys):
    assert_one_fault(refusal(tmp_path, capsys, GOOD, settings), key, expected)

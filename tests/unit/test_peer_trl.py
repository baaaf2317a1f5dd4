"""mppo's statistics and defaults against TRL's own PPO, if TRL is installed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mppo.algos.masked import masked_whiten, merged_moments, sequence_moments
from mppo.recipe.presets import PRESETS


@pytest.mark.parametrize("seed", range(4))
def test_masked_statistics_are_those_of_trl(seed):
    theirs = pytest.importorskip(
        "trl.experimental.ppo.ppo_trainer", reason="the optional package trl (1.12) is missing"
    )
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(5, 40, generator=random) * 3 + 1
    mask = torch.rand(5, 40, generator=random) < 0.6
    x, inside = values.flatten(), mask.flatten().float()
    close = torch.testing.assert_close
    moments = merged_moments(sequence_moments(x, inside, torch.tensor([0, len(x)])))
    close(torch.tensor(moments.mean), theirs.masked_mean(values, mask))
    close(torch.tensor(moments.var()), theirs.masked_var(values, mask))
    for shift in (True, False):
        expected = theirs.masked_whiten(values, mask, shift_mean=shift)[mask]
        close(masked_whiten(x, inside, shift_mean=shift)[mask.flatten()], expected)


FIELDS = {
    "algorithm.gamma": "gamma",
    "algorithm.lam": "lam",
    "algorithm.whiten_rewards": "whiten_rewards",
    "algorithm.kl_penalty": "kl_estimator",
    "algorithm.kl_ctrl.kl_coef": "kl_coef",
    "actor.ppo_epochs": "num_ppo_epochs",
    "actor.clip_ratio": "cliprange",
    "actor.optim.lr": "learning_rate",
    "actor.optim.lr_decay_style": "lr_scheduler_type",
    "actor.optim.weight_decay": "weight_decay",
    "critic.cliprange_value": "cliprange_value",
    "critic.value_loss_coef": "vf_coef",
    "data.max_response_length": "response_length",
    "rollout.temperature": "temperature",
    "trainer.seed": "seed",
    "trainer.total_epochs": "num_train_epochs",
}
"""Our key to TRL's field."""


def test_the_preset_starts_from_trls_defaults():
    theirs = pytest.importorskip(
        "trl.experimental.ppo", reason="the optional package trl (1.12) is missing"
    )
    ours = {k: v for values in PRESETS["trl"].values() for k, v in values.items()}
    defaults = {field.name: field.default for field in dataclasses.fields(theirs.PPOConfig)}
    for key, name in FIELDS.items():
        assert ours[key] == getattr(defaults[name], "value", defaults[name]), key
    betas = (defaults["adam_beta1"], defaults["adam_beta2"])
    assert ours["actor.optim.betas"] == ours["critic.optim.betas"] == betas
    assert defaults["num_mini_batches"] == 1
    assert defaults["missing_eos_penalty"] is None

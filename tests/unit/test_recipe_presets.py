"""Presets: every row names a real key with a valid value, and the user always wins."""

import re
from pathlib import Path

import pytest
from preset_table import preset_table

from mppo.recipe.load import recipe_keys
from mppo.recipe.presets import PRESETS, CopyOf, IfSet, apply_preset
from mppo.recipe.schema import Recipe

NAMES = tuple(PRESETS)


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_a_key_of_the_recipe_given_once(name):
    keys = [key for values in PRESETS[name].values() for key in values]
    assert set(keys) <= set(recipe_keys())
    assert len(keys) == len(set(keys))
    assert all(PRESETS[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_alone_is_a_valid_recipe_with_its_values(name):
    document = {"algorithm": {"preset": name}, "data": {"train_batch_size": 96}}
    recipe = Recipe.model_validate(apply_preset(document))
    for key, preset in (row for values in PRESETS[name].values() for row in values.items()):
        value = recipe
        for part in key.split("."):
            value = getattr(value, part)
        if not isinstance(preset, CopyOf | IfSet) and key != "data.train_batch_size":
            assert value == preset, key


def test_values_set_by_the_user_stay_even_null():
    document = {
        "algorithm": {"preset": "verl", "lam": 0.9, "kl_ctrl": {"horizon": 5}},
        "actor": {"clip_ratio_c": None},
    }
    recipe = Recipe.model_validate(apply_preset(document))
    assert recipe.algorithm.lam == 0.9
    assert recipe.algorithm.kl_ctrl.horizon == 5
    assert recipe.actor.clip_ratio_c is None
    assert recipe.critic.cliprange_value == 0.5
    assert "critic" not in document


def test_defaults_derived_from_another_key_follow_the_users_value():
    document = {
        "algorithm": {"preset": "openrlhf"},
        "actor": {"optim": {"lr": 4e-6}, "ppo_epochs": 3},
    }
    recipe = Recipe.model_validate(apply_preset(document))
    assert recipe.actor.optim.min_lr == pytest.approx(4e-7)
    assert recipe.critic.ppo_epochs == 3
    trl = apply_preset({"algorithm": {"preset": "trl"}, "data": {"train_batch_size": 48}})
    assert Recipe.model_validate(trl).actor.ppo_mini_batch_size == 48


def test_verls_critic_follows_the_actor():
    actor = {"ppo_epochs": 2, "use_dynamic_bsz": True, "shuffle": True}
    recipe = Recipe.model_validate(apply_preset({"algorithm": {"preset": "verl"}, "actor": actor}))
    critic = recipe.critic
    assert (critic.ppo_epochs, critic.use_dynamic_bsz, critic.shuffle) == (2, True, True)


def test_defaults_that_need_another_key_apply_only_with_it():
    for name, coef in (("openrlhf", 0.05), ("deepspeed_chat", 27.8)):
        preset = {"algorithm": {"preset": name}}
        assert "ptx_coef" not in apply_preset(preset)["actor"]
        with_text = preset | {"data": {"ptx_files": ["text.jsonl"]}}
        assert apply_preset(with_text)["actor"]["ptx_coef"] == coef
        off = with_text | {"actor": {"ptx_coef": 0.0}}
        assert apply_preset(off)["actor"]["ptx_coef"] == 0.0


def test_without_a_preset_or_with_a_wrong_one_nothing_changes():
    for document in ({}, {"algorithm": {"preset": "ppo"}}, {"algorithm": 3}):
        assert apply_preset(document) == document


def test_a_fault_in_the_users_document_is_left_for_validation():
    document = {"algorithm": {"preset": "trl"}, "actor": "fast"}
    assert apply_preset(document)["actor"] == "fast"


def test_the_documented_table_is_the_code():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    assert preset_table() in page


def test_every_key_in_the_migration_guide_exists():
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    right = [
        cells[1]
        for line in page.splitlines()
        if len(cells := [cell for cell in line.split("|") if cell.strip()]) == 2
    ]
    sections = tuple(f"{name}." for name in Recipe.model_fields)
    named = [word for cell in right for word in re.findall(r"`([a-z_.]+)", cell)]
    keys = [word for word in named if word.startswith(sections)]
    known = recipe_keys()
    free = ("rollout.server_args.", "reward.kwargs.")  # of SGLang, and of the kind of reward
    keys = [key for key in keys if not key.startswith(free)]
    missing = [k for k in keys if not any(key == k or key.startswith(k + ".") for key in known)]
    assert len(keys) > 80
    assert missing == []


FLAGS = {
    "verl": """
        data.train_batch_size rollout.n actor.ppo_mini_batch_size critic.ppo_mini_batch_size
        actor.ppo_micro_batch_size actor.clip_ratio actor.ppo_epochs critic.ppo_epochs
        algorithm.gamma algorithm.lam algorithm.adv_estimator actor.use_kl_loss actor.kl_loss_coef
        actor.kl_loss_type algorithm.use_kl_in_reward algorithm.kl_penalty
        algorithm.kl_ctrl.kl_coef algorithm.kl_ctrl.type algorithm.kl_ctrl.horizon
        algorithm.kl_ctrl.target_kl actor.clip_ratio_c trainer.n_gpus_per_node trainer.logger
        rollout.tensor_model_parallel_size critic.model.path
    """,
    "TRL": """
        learning_rate num_ppo_epochs num_mini_batches output_dir per_device_train_batch_size
        gradient_accumulation_steps total_episodes model_name_or_path sft_model_path
        reward_model_path local_rollout_forward_batch_size non_eos_penalty stop_token
        penalty_reward_value missing_eos_penalty num_sample_generations cliprange cliprange_value
        kl_coef vf_coef gamma lam response_length temperature whiten_rewards
    """,
    "DeepSpeed-Chat": """
        kl_ctl cliprange cliprange_value clip_reward_value gamma lam ppo_epochs align_overflow
        unsup_coef enable_ema
    """,
    "OpenRLHF": """
        prompt_data pretrain_data pretrain reward_pretrain num_episodes rollout_batch_size
        micro_rollout_batch_size max_epochs prompt_max_len generate_max_len max_len max_samples
        max_norm l2 ptx_coef eps_clip value_clip lambd gamma micro_train_batch_size
        train_batch_size load_checkpoint normalize_reward top_p temperature seed local_rank
        zero_stage gradient_checkpointing bf16 actor_learning_rate critic_learning_rate kl_target
        init_kl_coef enable_ema zpg adam_offload actor_init_on_gpu flash_attn aux_loss_coef
        grad_accum_dtype disable_trace_cache
    """,
}
"""Every flag that the systems' own pages on PPO name."""


@pytest.mark.parametrize("system", FLAGS)
def test_every_flag_of_a_systems_documentation_has_a_row(system):
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    part = page.split(f"\n## {system}")[1].split("\n## ")[0]
    named = set(re.findall(r"`(?:actor_rollout_ref\.)?([\w.]+)[`:=]", part))
    assert [flag for flag in FLAGS[system].split() if flag not in named] == []

"""Contradictory algorithm options are refused, with key and fix."""

import pytest

from mppo.recipe.rules import algorithm_rules
from mppo.recipe.rules.rule import RULES, RuleContext
from mppo.recipe.schema import Recipe

OWN = [function for _, function in RULES if function.__module__ == algorithm_rules.__name__]


def faults_of(**sections):
    case = RuleContext(recipe=Recipe.model_validate(sections), world_size=1, shapes={})
    return {fault.key for function in OWN for fault in function(case)}


def test_the_default_recipe_has_no_fault():
    assert faults_of() == set()
    assert OWN


CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        (
            {"algorithm": {"rollout_correction": {"bypass_mode": True, "rollout_is": "token"}}},
            f"{CORRECTION}.rollout_is",
        ),
        (
            {"algorithm": {"rollout_correction": {"rollout_token_veto_threshold": 2.0}}},
            f"{CORRECTION}.rollout_token_veto_threshold",
        ),
        (
            {"actor": {"policy_loss": {"loss_mode": "gspo"}, "loss_agg_mode": "token-sum"}},
            "actor.loss_agg_mode",
        ),
        ({"actor": {"policy_loss": {"loss_mode": "dis"}}}, f"{CORRECTION}.bypass_mode"),
        (
            {
                "actor": {"policy_loss": {"loss_mode": "dis"}, "clip_ratio_low": 1.0},
                "algorithm": {"rollout_correction": {"bypass_mode": True}},
            },
            "actor.clip_ratio_low",
        ),
        ({"actor": {"policy_loss": {"loss_mode": "reinforce"}}}, f"{CORRECTION}.bypass_mode"),
        ({"actor": {"policy_loss": {"loss_mode": "dro"}}}, "actor.policy_loss.dro_beta"),
        ({"actor": {"policy_loss": {"dro_beta": 1.0}}}, "actor.policy_loss.dro_beta"),
        ({"algorithm": {"adv_estimator": "grpo_passk"}}, "rollout.n"),
        ({"algorithm": {"f_norm": 2.0}}, "algorithm.f_norm"),
        (
            {"algorithm": {"whiten_over": "group", "whiten_advantages": False}},
            "algorithm.whiten_over",
        ),
        ({"algorithm": {"whiten_over": "group"}}, "rollout.n"),
        (
            {"actor": {"policy_loss": {"loss_mode": "gspo", "tau_neg": 2.0}}},
            "actor.policy_loss.tau_neg",
        ),
        ({"actor": {"policy_loss": {"clip_cov_ub": 9.0}}}, "actor.policy_loss.clip_cov_ub"),
        ({"actor": {"policy_loss": {"ppo_kl_coef": 1.0}}}, "actor.policy_loss.ppo_kl_coef"),
        ({"algorithm": {"pf_ppo": {"weight_pow": 1.0}}}, "algorithm.pf_ppo.weight_pow"),
        (
            {"algorithm": {"rollout_correction": {"rollout_is_mode": "mask"}}},
            f"{CORRECTION}.rollout_is_mode",
        ),
        ({"reward": {"overlong_penalty_factor": 2.0}}, "reward.overlong_penalty_factor"),
        (
            {"algorithm": {"norm_adv_by_std_in_grpo": False}},
            "algorithm.norm_adv_by_std_in_grpo",
        ),
        ({"algorithm": {"normalize_scores": {"mode": "group"}}}, "rollout.n"),
        (
            {"algorithm": {"normalize_scores": {"mode": "batch", "std": 2.0}}},
            "algorithm.normalize_scores.std",
        ),
        ({"actor": {"ptx_coef": 0.1}}, "data.ptx_files"),
        ({"data": {"ptx_batch_size": 4}}, "data.ptx_batch_size"),
        (
            {
                "actor": {"ptx_coef": 0.1, "router_replay": "R3"},
                "data": {"ptx_files": ["text.jsonl"]},
            },
            "actor.router_replay",
        ),
        ({"algorithm": {"filter_groups": {"enable": True}}}, "rollout.n"),
        (
            {"algorithm": {"filter_groups": {"max_num_gen_batches": 3}}},
            "algorithm.filter_groups.max_num_gen_batches",
        ),
        (
            {
                "algorithm": {"filter_groups": {"enable": True}, "adv_estimator": "remax"},
                "rollout": {"n": 4},
            },
            "algorithm.filter_groups.enable",
        ),
    ],
)
def test_combinations_without_sense_are_refused(sections, key):
    assert faults_of(**sections) == {key}


def test_what_makes_sense_passes():
    assert not faults_of(
        actor={"policy_loss": {"loss_mode": "dis"}, "clip_ratio_low": 0.3, "clip_ratio_high": 5.0},
        algorithm={"rollout_correction": {"bypass_mode": True}},
    )
    assert not faults_of(
        actor={"policy_loss": {"loss_mode": "reinforce"}},
        algorithm={"rollout_correction": {"bypass_mode": True, "rollout_is": "sequence"}},
    )
    assert not faults_of(
        algorithm={"adv_estimator": "grpo_passk", "norm_adv_by_std_in_grpo": False},
        rollout={"n": 2},
    )
    assert not faults_of(actor={"use_kl_loss": True, "kl_loss_type": "full"})
    assert not faults_of(actor={"policy_loss": {"loss_mode": "gmpo"}})
    assert not faults_of(algorithm={"adv_estimator": "gpg", "f_norm": 2.0}, rollout={"n": 2})
    assert not faults_of(algorithm={"whiten_over": "group"}, rollout={"n": 4})
    assert not faults_of(actor={"policy_loss": {"loss_mode": "sapo", "tau_neg": 2.0}})
    assert not faults_of(algorithm={"use_pf_ppo": True, "pf_ppo": {"weight_pow": 1.0}})
    assert not faults_of(reward={"overlong_buffer_len": 8, "overlong_penalty_factor": 2.0})
    assert not faults_of(algorithm={"normalize_scores": {"mode": "given", "std": 2.0}})

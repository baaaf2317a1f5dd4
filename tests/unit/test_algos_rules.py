"""Combinations of algorithm options that make no sense are refused, with key and cure."""

import pytest

from mppo.config import algorithm_rules
from mppo.config.rule import RULES, Case
from mppo.config.schema import Recipe

OWN = [function for _, function in RULES if function.__module__ == algorithm_rules.__name__]


def faults_of(**sections):
    case = Case(recipe=Recipe.model_validate(sections), world_size=1, shapes={})
    return {fault.key for function in OWN for fault in function(case)}


def test_the_default_recipe_has_no_fault():
    assert faults_of() == set()
    assert len(OWN) == 6


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
            {"algorithm": {"use_kl_in_reward": True, "kl_penalty": "full+"}},
            "algorithm.kl_penalty",
        ),
        ({"actor": {"use_kl_loss": True, "kl_loss_type": "full"}}, "actor.kl_loss_type"),
        (
            {"actor": {"policy_loss": {"loss_mode": "gspo"}, "loss_agg_mode": "token-sum"}},
            "actor.loss_agg_mode",
        ),
        ({"algorithm": {"f_norm": 2.0}}, "algorithm.f_norm"),
        (
            {"algorithm": {"norm_adv_by_std_in_grpo": False}},
            "algorithm.norm_adv_by_std_in_grpo",
        ),
        ({"algorithm": {"normalize_scores": {"mode": "group"}}}, "rollout.n"),
        (
            {"algorithm": {"normalize_scores": {"mode": "batch", "std": 2.0}}},
            "algorithm.normalize_scores.std",
        ),
    ],
)
def test_combinations_without_sense_are_refused(sections, key):
    assert faults_of(**sections) == {key}


def test_what_makes_sense_passes():
    assert not faults_of(actor={"kl_loss_type": "full"})
    assert not faults_of(actor={"policy_loss": {"loss_mode": "gmpo"}})
    assert not faults_of(algorithm={"adv_estimator": "gpg", "f_norm": 2.0})
    assert not faults_of(algorithm={"normalize_scores": {"mode": "given", "std": 2.0}})

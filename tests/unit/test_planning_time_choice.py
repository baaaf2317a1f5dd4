"""What a search of layouts chooses from, and what a choice changes in a recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mppo.planning.time.choice import LayoutChoice
from mppo.recipe.checks import check_recipe
from mppo.recipe.load import load_recipe, resolved_yaml

ROOT = Path(__file__).parents[2]
SPARSE = {"actor": True, "critic": True}
RECIPE = load_recipe(ROOT / "recipes" / "qwen3_30b_a3b_gsm8k_math.yaml")


def test_a_choice_is_a_layout_of_both_trained_roles():
    choice = LayoutChoice(2, 2, 2, 1, 8, 2, 8192, recomputes=True, server=4, server_ep=4)
    recipe = choice.applied(RECIPE, SPARSE, 32)
    for section in (recipe.actor, recipe.critic):
        layout = section.megatron.layout(32)
        sizes = (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.etp)
        assert sizes == (2, 2, 2, 1, 8, 2)
        assert section.ppo_max_token_len_per_gpu == 8192
        assert section.megatron.recompute_granularity == "full"
    assert recipe.rollout.tensor_model_parallel_size == 4
    assert recipe.rollout.expert_parallel_size == 4
    assert recipe.trainer == RECIPE.trainer
    assert choice.describe() == (
        "TP2 x PP2 x VPP2 x EP8 x ETP2, 8,192 tokens, recomputation, server TP4 EP4"
    )


def test_a_critic_may_have_a_choice_of_its_own():
    choice = LayoutChoice(2, 2, ep=8, server=4).changed("critic", tp=1, tokens=8192)
    recipe = choice.applied(RECIPE, SPARSE, 32)
    layouts = [role.megatron.layout(32) for role in recipe.roles()]
    assert [(one.tp, one.pp, one.ep) for one in layouts] == [(2, 2, 8), (1, 2, 8)]
    assert (recipe.actor.token_budget, recipe.critic.token_budget) == (4096, 8192)
    assert not choice.shared
    text = "TP2 x PP2 x EP8, 4,096 tokens, critic (PP2 x EP8, 8,192 tokens), server TP4"
    assert choice.describe() == text
    assert choice.changed("actor", pp=4).of("critic") == choice.of("critic")
    alike = choice.changed("critic", tp=2, tokens=4096)
    assert alike.shared
    assert alike.without_repeats() == LayoutChoice(2, 2, ep=8, server=4)
    assert choice.without_repeats() == choice
    assert choice.changed("critic", tokens=16384).needs_as_much(choice)
    assert not choice.changed("critic", recomputes=True).needs_as_much(choice)


def test_one_role_may_be_updated_after_the_other():
    choice = LayoutChoice(ep=8, server=4, sequential=True)
    assert choice.describe() == "EP8, 4,096 tokens, one role after the other, server TP4"
    found = replace(choice, server=2, apart=8).applied(RECIPE, SPARSE, 32).trainer
    assert (found.schedule, found.nnodes, found.n_gpus_per_node) == ("sequential", 3, 8)
    together = replace(choice, sequential=False)
    assert together.applied(RECIPE, SPARSE, 32).trainer.schedule == RECIPE.trainer.schedule
    assert not choice.needs_as_much(together), "its memory is another one"


def test_a_frozen_role_keeps_its_micro_batches():
    recipe = load_recipe(ROOT / "recipes" / "qwen2_7b_rm.yaml")
    sparse = {role.name: False for role in recipe.roles()}
    choice = LayoutChoice().changed("reward_model", tp=4, pp=2, tokens=0)
    found = choice.applied(recipe, sparse, 8).reward_model
    layout = found.megatron.layout(8)
    assert (layout.tp, layout.pp) == (4, 2)
    assert found.batching == recipe.reward_model.batching
    assert choice.describe() == "DP, 4,096 tokens, reward_model (TP4 x PP2), server TP1"


@pytest.mark.parametrize(("world", "apart", "ranks"), [(32, 8, (3, 8)), (32, 16, (2, 8)),
                                                       (8, 2, (1, 6))])  # fmt: skip
def test_servers_on_gpus_of_their_own_leave_the_others(world, apart, ranks):
    recipe = LayoutChoice(server=2, apart=apart).applied(RECIPE, SPARSE, world)
    assert (recipe.trainer.nnodes, recipe.trainer.n_gpus_per_node) == ranks
    assert recipe.rollout.mode == "disaggregated"
    assert len(recipe.rollout.urls) == apart // 2
    assert recipe.rollout.max_staleness == 0
    assert recipe.algorithm == RECIPE.algorithm


def test_one_step_ahead_older_samples_are_corrected():
    recipe = LayoutChoice(apart=16, ahead=True).applied(RECIPE, SPARSE, 32)
    assert recipe.rollout.max_staleness == 1
    assert recipe.algorithm.rollout_correction.rollout_is == "token"


@pytest.mark.parametrize("choice", [
    LayoutChoice(2, 2, 2, 1, 8, 2, 8192, recomputes=True, server=4, server_ep=4),
    LayoutChoice(2, 2, ep=8, server=2, apart=16),
    LayoutChoice(2, 2, ep=8, server=2, apart=16, ahead=True),
])  # fmt: skip
def test_a_choice_is_a_valid_recipe_and_survives_its_file(choice, tmp_path):
    recipe = choice.applied(RECIPE, SPARSE, 32)
    assert check_recipe(recipe, 32 - choice.apart, {}) == []
    (tmp_path / "found.yaml").write_text(resolved_yaml(recipe))
    assert resolved_yaml(load_recipe(tmp_path / "found.yaml")) == resolved_yaml(recipe)


def test_more_tokens_or_no_recomputation_need_as_much():
    choice = LayoutChoice(tp=2, tokens=8192, recomputes=True)
    assert choice.needs_as_much(choice)
    assert replace(choice, tokens=16384).needs_as_much(choice)
    assert replace(choice, recomputes=False).needs_as_much(choice)
    assert not replace(choice, tokens=4096).needs_as_much(choice)
    assert not replace(choice, tp=1).needs_as_much(choice)

"""Rules between keys, and the counts of a dry run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mppo.parallel.layout import Layout
from mppo.planning.describe import describe_plan
from mppo.planning.memory import (
    ParameterCount,
    count_parameters,
    experts_per_token,
    role_memory,
    stage_layers,
)
from mppo.planning.run_plan import plan_roles
from mppo.recipe.checks import check_recipe
from mppo.recipe.errors import ConfigError
from mppo.recipe.load import load_recipe
from mppo.recipe.model_shape import model_shape
from mppo.recipe.rules.rule import RULES, world_size_of
from mppo.trainer.start.loading import load_checked
from mppo.weights.table import parameter_table

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
CP, COMM = "context_parallel_size", "actor.megatron.cp_comm_type"
DENSE = SimpleNamespace(
    model_type="llama", hidden_size=64, intermediate_size=96, num_hidden_layers=6,
    num_attention_heads=8, num_key_value_heads=2, vocab_size=101, max_position_embeddings=2048,
    tie_word_embeddings=False,
)  # fmt: skip
TIED = SimpleNamespace(**{**vars(DENSE), "tie_word_embeddings": True})
MOE = SimpleNamespace(
    model_type="qwen3_moe", hidden_size=64, intermediate_size=96, num_hidden_layers=6,
    num_attention_heads=8, num_key_value_heads=4, head_dim=16, vocab_size=100, num_experts=8,
    num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1, mlp_only_layers=[],
    max_position_embeddings=2048, tie_word_embeddings=False, norm_topk_prob=True,
)  # fmt: skip


def recipe(*overrides: str):
    return load_recipe(None, ["data.task=arithmetic", *overrides])


def models(config, **own):
    """Config objects by role."""
    return {**dict.fromkeys(("actor", "critic", "ref"), config), **own}


def keys(issues) -> list[str]:
    return [issue.key for issue in issues]


def test_the_defaults_with_a_task_break_no_rule():
    assert check_recipe(recipe(), 1, models(DENSE)) == []


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_tensor_parallel_may_be_a_multiple_of_the_key_value_heads(tp):
    assert check_recipe(recipe(f"actor.megatron.{TP}={tp}"), 8, models(DENSE)) == []


def test_sequence_parallel_without_tensor_parallel_is_harmless():
    assert check_recipe(recipe("actor.megatron.sequence_parallel=true"), 1, models(DENSE)) == []


@pytest.mark.parametrize(
    ("first", "last", "pp", "fine"),
    [(None, None, 2, True), (None, None, 4, False), (1, None, 2, True), (2, 2, 3, True),
     (1, 1, 4, True), (2, 1, 4, False), (6, None, 2, False), (3, 3, 2, True), (2, 3, 2, False)],
)  # fmt: skip
def test_uneven_stages(first, last, pp, fine):
    overrides = [f"actor.megatron.{PP}={pp}"]
    for name, value in (("first", first), ("last", last)):
        if value is not None:
            overrides.append(f"actor.megatron.num_layers_in_{name}_pipeline_stage={value}")
    issues = check_recipe(recipe(*overrides), pp, models(DENSE))
    assert keys(issues) == ([] if fine else [f"actor.megatron.{PP}"])


def test_the_critic_has_its_own_model():
    overrides = ("critic.path=other", f"critic.megatron.{PP}=3")
    assert check_recipe(recipe(*overrides), 3, models(DENSE)) == []
    four_layers = SimpleNamespace(**{**vars(DENSE), "num_hidden_layers": 4})
    assert keys(check_recipe(recipe(*overrides), 3, models(DENSE, critic=four_layers))) == [
        f"critic.megatron.{PP}"
    ]


def test_a_reference_without_layout_uses_the_actors():
    expected = recipe("algorithm.use_kl_in_reward=true", f"actor.megatron.{TP}=2")
    roles = {role.name: role for role in expected.roles()}
    assert roles["ref"].megatron is expected.actor.megatron
    issues = check_recipe(expected, 3, models(DENSE))
    assert keys(issues) == ["actor.megatron"], "told once, not once per role"


def test_unused_roles_are_not_checked():
    estimator = ("algorithm.adv_estimator=reinforce_plus_plus",)
    assert check_recipe(recipe(f"critic.megatron.{TP}=7", *estimator), 1, models(DENSE)) == []
    assert check_recipe(recipe("ref.megatron.tensor_model_parallel_size=7"), 1, models(DENSE)) == []


def test_rescaled_positions_are_not_checked():
    scaled = SimpleNamespace(**vars(DENSE), rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert check_recipe(recipe("data.max_response_length=9000"), 1, models(scaled)) == []
    assert keys(check_recipe(recipe("data.max_response_length=9000"), 1, models(DENSE))) == [
        "data.max_response_length"
    ]


def test_one_mistake_gives_one_message():
    with pytest.raises(ConfigError) as caught:
        load_checked(
            None, ["data.task=arithmetic", "actor.ppo_mini_batch_size=x"], 1, lambda _: DENSE
        )
    assert keys(caught.value.issues) == ["actor.ppo_mini_batch_size"]


def test_an_unreadable_model_is_an_issue_of_its_key():
    def unreadable(path):
        raise OSError("not a JSON file")

    with pytest.raises(ConfigError, match="not a JSON file") as caught:
        load_checked(None, ["data.task=arithmetic"], 1, unreadable)
    assert keys(caught.value.issues) == ["model.path"]


def test_every_rule_has_a_docstring():
    for keys_read, function in RULES:
        assert function.__doc__, function.__name__
        assert keys_read, function.__name__


def test_world_size_comes_from_the_recipe():
    assert world_size_of(recipe("trainer.nnodes=4", "trainer.n_gpus_per_node=8")) == 32
    layouts = (f"actor.megatron.{TP}=2", f"actor.megatron.{PP}=2", f"critic.megatron.{PP}=3")
    assert world_size_of(recipe(*layouts)) == 12


def test_layers_are_assigned_to_stages_round_robin_by_chunk():
    assert stage_layers(8, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert stage_layers(8, 2, vpp=2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert stage_layers(7, 3, last=1) == [[0, 1, 2], [3, 4, 5], [6]]
    assert stage_layers(5, 3, first=1, last=2) == [[0], [1, 2], [3, 4]]
    assert stage_layers(7, 2, vpp=2, chunks=(1, 3, 2, 1)) == [[0, 4, 5], [1, 2, 3, 6]]


def by_hand(config) -> int:
    """Parameters of a dense Llama, from its sizes."""
    h, f, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    kv = h // heads * config.num_key_value_heads
    layer = h * h + 2 * h * kv + h * h + 3 * h * f + 2 * h
    ends = config.vocab_size * h * (1 if config.tie_word_embeddings else 2) + h
    return config.num_hidden_layers * layer + ends


@pytest.mark.parametrize("config", [DENSE, TIED], ids=["untied", "tied"])
def test_the_parameter_count_equals_a_sum_by_hand(config):
    table = parameter_table(model_shape(config))
    assert count_parameters(table, Layout(world=1), 0, list(range(6)), False).total == by_hand(
        config
    )


def test_a_critic_has_one_output():
    table = parameter_table(model_shape(DENSE))
    policy = count_parameters(table, Layout(world=1), 0, list(range(6)), False).total
    value = count_parameters(table, Layout(world=1), 0, list(range(6)), True).total
    assert policy - value == 101 * 64 - 64


def test_frozen_parameters_take_the_bytes_of_their_weights_only():
    table, layout = parameter_table(model_shape(DENSE)), Layout(world=1)
    count = count_parameters(table, layout, 0, list(range(6)), True, ("self_attn", "model.norm"))
    kv = 64 // DENSE.num_attention_heads * DENSE.num_key_value_heads
    frozen = 6 * (2 * 64 * 64 + 2 * 64 * kv) + 64
    assert (count.frozen_dense, count.frozen_expert) == (frozen, 0)
    critic = recipe().roles()[1]
    assert critic.name == "critic"
    memory = role_memory(critic, layout, count, "bfloat16")
    assert memory.weights == 2 * count.total
    assert memory.gradients == 4 * (count.total - frozen)
    assert memory.optimizer == 12 * (count.total - frozen)
    mixed = count_parameters(
        parameter_table(model_shape(MOE)), Layout(world=4, ep=4), 0, [0], True, (r"experts\.\d",)
    )
    assert mixed.frozen_expert == mixed.expert
    assert mixed.frozen_dense == 0


def test_stages_hold_every_parameter_once():
    table = parameter_table(model_shape(DENSE))
    layout = Layout(world=3, pp=3)
    counts = [
        count_parameters(table, layout, stage, layers, False).total
        for stage, layers in enumerate(stage_layers(6, 3))
    ]
    assert sum(counts) == by_hand(DENSE)


def test_a_tied_pipeline_holds_the_embedding_at_both_ends():
    table = parameter_table(model_shape(TIED))
    layout = Layout(world=2, pp=2)
    counts = [
        count_parameters(table, layout, stage, layers, False).total
        for stage, layers in enumerate(stage_layers(6, 2))
    ]
    assert sum(counts) == by_hand(TIED) + 101 * 64


def test_experts_are_divided_over_their_ranks():
    table = parameter_table(model_shape(MOE))
    alone = count_parameters(table, Layout(world=1), 0, list(range(6)), False)
    spread = count_parameters(table, Layout(world=4, ep=4), 0, list(range(6)), False)
    assert alone.expert == 6 * 8 * 3 * 64 * 32
    assert (spread.expert, spread.dense) == (alone.expert // 4, alone.dense)
    assert experts_per_token(MOE) == 2


def test_memory_of_weights_gradients_and_optimizer():
    role = recipe().roles()[0]
    layout, count = Layout(world=4), ParameterCount(1000, 0)
    memory = role_memory(role, layout, count, "bfloat16")
    assert (memory.weights, memory.gradients, memory.optimizer) == (2000, 4000, 12 * 250)
    complete = role_memory(role, layout, count, "float32")
    assert (complete.weights, complete.optimizer) == (4000, 8 * 250)


def test_a_reward_model_has_one_output_and_a_type_of_its_own():
    chosen = recipe(
        "reward_model.path=x", "reward_model.dtype=float32", f"reward_model.megatron.{TP}=2"
    )
    assert check_recipe(chosen, 2, models(DENSE, reward_model=DENSE)) == []
    *_, plan = plan_roles(chosen, 2, models(DENSE, reward_model=DENSE))
    assert plan.parameters == by_hand(DENSE) - 101 * 64 + 64
    (memory,) = plan.memory
    assert memory.resident == memory.weights == 4 * plan.stage_parameters[0]
    assert plan.mini_batches == 0


def test_a_frozen_role_keeps_weights_only():
    frozen = recipe("algorithm.use_kl_in_reward=true").roles()[-1]
    memory = role_memory(frozen, Layout(world=1), ParameterCount(1000, 0), "bfloat16")
    assert (memory.gradients, memory.optimizer, memory.building) == (0, 0, 2000)


def test_the_weights_exist_twice_while_a_role_is_built():
    """Weights 2, copied, and gradients 4 bytes; or weights, gradients and optimizer 12 / dp."""
    role, count = recipe().roles()[0], ParameterCount(1000, 0)
    peaks = [role_memory(role, Layout(world=n), count, "bfloat16").building for n in (4, 16)]
    assert peaks == [6000 + 12 * 250, 8000]
    experts = ParameterCount(1000, 3000)
    memory = role_memory(role, Layout(world=64), experts, "bfloat16")
    assert memory.building == 8000 + 6000 + 16000


def test_recomputation_lowers_activations_and_the_first_stage_holds_most():
    none = recipe(f"actor.megatron.{PP}=3")
    full = recipe(f"actor.megatron.{PP}=3", "actor.megatron.recompute_granularity=full")
    plain, saved = (
        [p.in_flight * p.kept for p in plan_roles(r, 3, models(DENSE))[0].passes]
        for r in (none, full)
    )
    assert plain[0] > plain[1] > plain[2] > 0
    assert saved[0] < plain[0]


def test_a_ring_needs_less_memory_for_exchanged_keys_and_values():
    """Gathered: three times keys and values of 2 x 2 heads x 8; a ring: six times a rank's."""
    layout = [f"actor.megatron.{CP}=4", "model.dtype=float32"]
    chosen, gather, ring = (
        plan_roles(recipe(*layout, *more), 4, models(DENSE))[0]
        for more in ([], [f"{COMM}=all_gather"], [f"{COMM}=p2p"])
    )
    tokens = gather.micro_batch_tokens
    assert chosen.passes[0].update == gather.passes[0].update
    gathered, passed = (plan.passes[0].layer(0).attention.backward for plan in (gather, ring))
    assert gathered - passed == 4 * tokens * 2 * 2 * 8 * (3 - 6 / 4)


def test_micro_batches_cover_the_mini_batch():
    expected = recipe(
        "data.train_batch_size=64", "actor.ppo_mini_batch_size=32", "rollout.n=2",
        "actor.ppo_micro_batch_size_per_gpu=5", "actor.ppo_epochs=3",
        "data.max_prompt_length=100", "data.max_response_length=28",
    )  # fmt: skip
    actor, critic = plan_roles(expected, 2, models(DENSE))
    assert (actor.mini_batches, actor.micro_batches, actor.micro_batch_tokens) == (6, 7, 5 * 128)
    assert (critic.mini_batches, critic.micro_batches) == (2, 4)


def test_dynamic_micro_batches_follow_the_token_budget():
    expected = recipe(
        "actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=500",
        "data.max_prompt_length=100", "data.max_response_length=28",
    )  # fmt: skip
    actor = plan_roles(expected, 2, models(DENSE))[0]
    assert (actor.micro_batches, actor.micro_batch_tokens) == (11, 3 * 128)


def test_the_plan_abbreviates_a_large_world():
    text = describe_plan(recipe(), 128, models(DENSE))
    assert "... and 64 more ranks" in text


def test_every_role_is_planned_with_its_own_model():
    expected = recipe("algorithm.use_kl_in_reward=true", "critic.path=c", "ref.path=r")
    actor, critic, ref = plan_roles(expected, 1, models(DENSE, critic=MOE, ref=TIED))
    _, alike = plan_roles(recipe("model.path=c"), 1, models(MOE))
    assert critic.memory == alike.memory
    assert critic.parameters == alike.parameters
    assert (actor.parameters, ref.parameters) == (by_hand(DENSE), by_hand(TIED))

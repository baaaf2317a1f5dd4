"""Which schedule a recipe gets, what is refused, and what a dry run says of it."""

from __future__ import annotations

import re

import pytest
from bad_recipe import GOOD, assert_one_fault, refusal
from test_recipe_checks import DENSE, PP
from transformers import LlamaConfig

from mppo.planning.describe import describe_plan
from mppo.planning.run_plan import plan_roles
from mppo.recipe.load import load_recipe
from mppo.recipe.schedule_kind import schedule_kind, streams_forward

REFUSED = [
    ("no such kind", "trainer.schedule=zero_bubble",
     "choose one of: auto, sequential, fused, flush_free"),
    ("unequal pipelines", "trainer.schedule=flush_free "
     "critic.megatron.pipeline_model_parallel_size=2",
     "the actor has 1 pipeline stages, the critic 2 fix: give both the same "
     "megatron.pipeline_model_parallel_size, or set it to auto, which then means sequential"),
    ("one role", "trainer.schedule=fused algorithm.adv_estimator=grpo rollout.n=2",
     "trains no critic fix: set algorithm.adv_estimator to gae, or set it to auto"),
    ("steps taken apart and together", "trainer.schedule=flush_free trainer.align_overflow=true",
     "set it to fused"),
]  # fmt: skip


def test_a_timeline_without_lists_is_refused(tmp_path, capsys):
    settings = "trainer.timeline={steps:[3]} critic.megatron.pipeline_model_parallel_size=2"
    message = refusal(tmp_path, capsys, GOOD, settings, "--dry-run", "--world-size", "2")
    assert_one_fault(message, "trainer.timeline.steps", "pipeline stages")


@pytest.mark.parametrize(
    ("settings", "wanted"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_a_schedule_that_cannot_be_is_refused(settings, wanted, tmp_path, capsys):
    message = refusal(tmp_path, capsys, GOOD, settings, "--dry-run", "--world-size", "2")
    assert_one_fault(message, "trainer.schedule", wanted)


AUTO = "critic.ppo_max_token_len_per_gpu=auto"
BUDGETS = ["actor.use_dynamic_bsz=true", "critic.use_dynamic_bsz=true"]
NOT_BALANCED = [
    ("no budgets", AUTO, "set actor.use_dynamic_bsz and critic.use_dynamic_bsz to true"),
    ("one budget", f"{AUTO} {BUDGETS[1]}", "set actor.use_dynamic_bsz to true"),
    (
        "no shared pipeline",
        f"{AUTO} {' '.join(BUDGETS)} actor.megatron.{PP}=2",
        "the actor has 2 pipeline stages, the critic 1",
    ),
]


@pytest.mark.parametrize(
    ("settings", "wanted"), [row[1:] for row in NOT_BALANCED], ids=[row[0] for row in NOT_BALANCED]
)
def test_a_budget_that_follows_no_other_is_refused(settings, wanted, tmp_path, capsys):
    message = refusal(tmp_path, capsys, GOOD, settings, "--dry-run", "--world-size", "2")
    assert_one_fault(message, "critic.ppo_max_token_len_per_gpu", wanted)


def test_one_role_has_no_other_to_balance_with(tmp_path, capsys):
    settings = "actor.ppo_max_token_len_per_gpu=auto algorithm.adv_estimator=grpo rollout.n=2"
    message = refusal(tmp_path, capsys, GOOD, settings, "--dry-run", "--world-size", "2")
    assert_one_fault(message, "actor.ppo_max_token_len_per_gpu", "trains no critic")


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        ((), "flush_free"),
        (("trainer.align_overflow=true",), "fused"),
        (("trainer.schedule=sequential",), "sequential"),
        (("algorithm.adv_estimator=grpo", "rollout.n=2"), "sequential"),
        ((f"actor.megatron.{PP}=2",), "sequential"),
        (
            (
                *(f"{role}.megatron.{PP}=2" for role in ("actor", "critic")),
                "critic.megatron.virtual_pipeline_model_parallel_size=2",
            ),
            "flush_free",
        ),
        (("actor.router_replay=R2",), "flush_free"),
        (("actor.router_replay=R2", "actor.ptx_coef=0.1"), "sequential"),
    ],
)
def test_the_schedule_is_flush_free_where_roles_and_layouts_allow_it(overrides, kind):
    assert schedule_kind(load_recipe(None, overrides)) == kind


def test_a_dry_run_names_the_schedule_and_what_each_kind_would_take():
    stages = [f"{role}.megatron.{PP}=2" for role in ("actor", "critic")]
    sizes = ["data.train_batch_size=64", "actor.ppo_mini_batch_size=16"]
    equal = "\n".join(_schedule_lines([*stages, *sizes]))
    assert "trainer.schedule = auto: flush_free" in equal
    assert re.search(r"sequential: 33\.3% of the time idle", equal)
    assert re.search(r"fused: 20\.\d% of the time idle, 0\.\d\d of sequential's time", equal)
    assert re.search(r"flush_free: 6\.\d% of the time idle, 0\.71 .* 2 micro-batches in", equal)
    unequal = "\n".join(_schedule_lines([stages[0], *sizes]))
    assert "sequential, because the actor has 2 pipeline stages, the critic 1" in unequal
    assert "with 2 pipeline stages each" in unequal


def test_a_dry_run_compares_the_kinds_of_interleaved_pipelines():
    chunks = "megatron.virtual_pipeline_model_parallel_size"
    keys = [f"{role}.{key}=2" for role in ("actor", "critic") for key in (f"megatron.{PP}", chunks)]
    sizes = ["data.train_batch_size=64", "actor.ppo_mini_batch_size=16"]
    shape = {key: value for key, value in vars(DENSE).items() if key != "model_type"}
    model = LlamaConfig(**{**shape, "num_hidden_layers": 8})
    lines = "\n".join(_schedule_lines([*keys, *sizes], actor=model, critic=model))
    assert "trainer.schedule = auto: flush_free" in lines
    assert re.search(r"sequential: 20\.0% of the time idle, 1\.00 .* 2 micro-batches in", lines)
    assert re.search(r"flush_free: 3\.0% of the time idle, 0\.82 .* 2\.5 micro-batches in", lines)


def test_a_dry_run_tells_how_much_larger_the_cheaper_role_s_micro_batches_should_be():
    stages = [f"{role}.megatron.{PP}=3" for role in ("actor", "critic")]
    sizes = ["data.train_batch_size=64", "actor.ppo_mini_batch_size=16"]
    sizes += ["actor.ppo_micro_batch_size_per_gpu=4", "critic.ppo_micro_batch_size_per_gpu=2"]
    last = _schedule_lines([*stages, *sizes], 3)[-1]
    assert last.startswith("a micro-batch of the critic costs 0.4"), last
    assert "if 2.0 times as large" in last
    equal = [*sizes[:-1], "critic.ppo_micro_batch_size_per_gpu=4"]
    assert _schedule_lines([*stages, *equal], 3)[-1].startswith("flush_free: ")


def test_a_dry_run_shows_the_budgets_with_which_a_run_starts():
    """A critic of a third of the layers costs less than a third; its activations take a third, and
    the output that a stage holds for the next one."""
    sizes = {key: value for key, value in vars(DENSE).items() if key != "model_type"}
    actor, critic = LlamaConfig(**sizes), LlamaConfig(**{**sizes, "num_hidden_layers": 2})
    stages = [f"{role}.megatron.{PP}=2" for role in ("actor", "critic")]
    fixed = [*stages, *BUDGETS, "actor.ppo_max_token_len_per_gpu=4096"]
    recipe = load_recipe(None, [*fixed, AUTO])
    line = _schedule_lines([*fixed, AUTO], actor=actor, critic=critic)[-1]
    assert line == (
        "tokens per GPU of a micro-batch, for passes of equal cost: "
        "actor 4,096, critic 11,569 (auto)"
    )
    plans = plan_roles(recipe, 2, {"actor": actor, "critic": critic})
    assert [plan.micro_batch_tokens for plan in plans] == [4096, 11264]


def test_a_reference_with_the_actor_s_limits_has_its_balanced_budget():
    sizes = {key: value for key, value in vars(DENSE).items() if key != "model_type"}
    keys = [*BUDGETS, "actor.ppo_max_token_len_per_gpu=auto", "algorithm.use_kl_in_reward=true"]
    recipe = load_recipe(None, [*keys, "critic.ppo_max_token_len_per_gpu=4096"])
    configs = dict.fromkeys(("actor", "critic", "ref"), LlamaConfig(**sizes))
    actor, critic, ref = plan_roles(recipe, 1, configs)
    assert critic.micro_batch_tokens == 4096
    assert ref.micro_batch_tokens == actor.micro_batch_tokens < 4096  # the actor has a vocabulary


def _schedule_lines(overrides: list[str], ranks: int = 2, actor=DENSE, critic=DENSE) -> list[str]:
    """The lines of the dry run that speak of the schedule."""
    text = describe_plan(load_recipe(None, overrides), ranks, {"actor": actor, "critic": critic})
    lines = text.splitlines()
    first = lines.index("# schedule of an update") + 1
    return lines[first : lines.index("", first)]


@pytest.mark.parametrize(
    ("overrides", "streamed"),
    [
        ([], False),
        ([f"{role}.megatron.{PP}=2" for role in ("actor", "critic")], True),
        (
            [
                *(f"{role}.megatron.{PP}=2" for role in ("actor", "critic")),
                "actor.megatron.virtual_pipeline_model_parallel_size=2",
            ],
            True,
        ),
        ([f"actor.megatron.{PP}=2"], False),
        ([f"actor.megatron.{PP}=2", "algorithm.adv_estimator=grpo", "rollout.n=2"], True),
    ],
)
def test_forward_passes_share_a_pipeline_of_equally_many_stages(overrides, streamed):
    assert streams_forward(load_recipe(None, overrides)) == streamed

"""TRL's keys compute mppo's: mini-batches, steps of the run, steps with a table of responses."""

from __future__ import annotations

import pytest

from mppo.recipe.load import read_recipe

BATCH = "data.train_batch_size=64"


def read(*overrides: str):
    remarks: list[str] = []
    recipe, issues = read_recipe(None, overrides, remarks)
    return recipe, issues, remarks


@pytest.mark.parametrize("name", ["num_mini_batches", "actor.num_mini_batches"])
def test_mini_batches_divide_the_batch(name):
    recipe, issues, remarks = read(BATCH, f"{name}=4")
    assert not issues
    assert recipe.actor.ppo_mini_batch_size == 16
    assert remarks == [f"{name}=4 is taken as actor.ppo_mini_batch_size=16"]


@pytest.mark.parametrize(("n", "steps"), [(1, 157), (2, 79)])
def test_episodes_are_responses_and_the_last_batch_may_be_incomplete(n, steps):
    recipe, issues, _ = read(BATCH, f"rollout.n={n}", "total_episodes=10000")
    assert not issues
    assert recipe.trainer.total_training_steps == steps


def test_the_presets_batch_counts_where_the_recipe_has_none():
    recipe, issues, _ = read("algorithm.preset=verl", "num_mini_batches=2", "total_episodes=2048")
    assert not issues
    assert recipe.actor.ppo_mini_batch_size == 512
    assert recipe.trainer.total_training_steps == 2


def test_the_recipe_file_has_them_too(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("num_mini_batches: 8\ntrainer: {total_episodes: 64}\n")
    recipe, issues = read_recipe(path, [])
    assert not issues
    assert (recipe.actor.ppo_mini_batch_size, recipe.trainer.total_training_steps) == (8, 1)


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["num_mini_batches=5"], "num_mini_batches", "train_batch_size = 64 is not a multiple"),
        (["num_mini_batches=0"], "num_mini_batches", "not a whole number above 0"),
        (["total_episodes=many"], "total_episodes", "not a whole number above 0"),
        (["num_mini_batches=4", "actor.ppo_mini_batch_size=8"], "num_mini_batches",
         "means actor.ppo_mini_batch_size = 16, also given as 8"),
        (["num_sample_generations=-1"], "trainer.num_sample_generations", "out of range"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_refused(overrides, key, words):
    _, issues, _ = read(BATCH, *overrides)
    assert [issue.key for issue in issues] == [key]
    assert words in str(issues[0])


def test_sample_generations_are_a_key_of_the_trainer():
    recipe, issues, _ = read("num_sample_generations=3")
    assert not issues
    assert recipe.trainer.num_sample_generations == 3

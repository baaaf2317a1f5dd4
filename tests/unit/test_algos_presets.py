"""Presets: every row names a real key with a valid value, and the user always wins."""

import re
from pathlib import Path

import pytest

from mppo.config.load import recipe_keys
from mppo.config.presets import PRESETS, Same, apply_preset, preset_table
from mppo.config.schema import Recipe

NAMES = tuple(PRESETS)


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_a_key_of_the_recipe_given_once(name):
    keys = [row.key for row in PRESETS[name]]
    assert set(keys) <= set(recipe_keys())
    assert len(keys) == len(set(keys))
    assert all(row.source for row in PRESETS[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_alone_is_a_valid_recipe_with_its_values(name):
    document = {"algorithm": {"preset": name}, "data": {"train_batch_size": 96}}
    recipe = Recipe.model_validate(apply_preset(document))
    for row in PRESETS[name]:
        value = recipe
        for part in row.key.split("."):
            value = getattr(value, part)
        if not isinstance(row.value, Same) and row.key != "data.train_batch_size":
            assert value == row.value, row.key


def test_what_the_user_set_stays_even_null():
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


def test_rows_that_follow_another_key_follow_the_user():
    document = {
        "algorithm": {"preset": "openrlhf"},
        "actor": {"optim": {"lr": 4e-6}, "ppo_epochs": 3},
    }
    recipe = Recipe.model_validate(apply_preset(document))
    assert recipe.actor.optim.min_lr == pytest.approx(4e-7)
    assert recipe.critic.ppo_epochs == 3
    trl = apply_preset({"algorithm": {"preset": "trl"}, "data": {"train_batch_size": 48}})
    assert Recipe.model_validate(trl).actor.ppo_mini_batch_size == 48


def test_without_a_preset_or_with_a_wrong_one_nothing_changes():
    for document in ({}, {"algorithm": {"preset": "ppo"}}, {"algorithm": 3}):
        assert apply_preset(document) == document


def test_a_fault_in_the_users_document_is_left_for_validation():
    document = {"algorithm": {"preset": "trl"}, "actor": "fast"}
    assert apply_preset(document)["actor"] == "fast"


def test_the_documented_table_is_the_code():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    assert preset_table() in page


def test_every_key_the_migration_guide_sends_people_to_exists():
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
    missing = [k for k in keys if not any(key == k or key.startswith(k + ".") for key in known)]
    assert len(keys) > 80
    assert missing == []

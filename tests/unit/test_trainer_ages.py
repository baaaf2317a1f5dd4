"""Explained variance by the age of tokens."""

from __future__ import annotations

from dataclasses import replace
from statistics import variance

import pytest
import torch
from random_outputs import outputs_of

from mppo.recipe.schema import Recipe
from mppo.trainer.advantages import estimate
from mppo.trainer.metrics import explained_by_age

BY_AGE = "critic/vf_explained_var_by_age/"
STEP = 7


def recipe_of(bound: int, **algorithm) -> Recipe:
    recipe = Recipe()
    rollout = recipe.rollout.model_copy(update={"max_staleness": bound})
    changed = recipe.algorithm.model_copy(update=algorithm)
    return recipe.model_copy(update={"rollout": rollout, "algorithm": changed})


def experience_of(versions: list[int]):
    """Three responses; the tokens have these weight versions in turn."""
    outputs = outputs_of([9, 14, 6], scores=[1.0, 0.0, 2.0])
    batch = outputs.batch
    inside_T = batch.response_mask_T > 0
    count = int(inside_T.sum())
    version_T = torch.full_like(batch.weight_version_T, -1)
    version_T[inside_T] = torch.tensor([versions[i % len(versions)] for i in range(count)])
    outputs = replace(outputs, batch=replace(batch, weight_version_T=version_T))
    return estimate(outputs, Recipe().algorithm, 0.0)


def test_each_age_has_the_explained_variance_of_its_tokens():
    experience = experience_of([6, 4, 6, 5])
    batch = experience.old.batch
    found = explained_by_age(experience, STEP, recipe_of(4))
    assert found.keys() == {f"{BY_AGE}{age}" for age in (0, 1, 2)}
    for age in (0, 1, 2):
        tokens = (batch.weight_version_T == STEP - 1 - age).nonzero()[:, 0].tolist()
        returns = [float(experience.returns_T[t]) for t in tokens]
        errors = [float(experience.returns_T[t] - experience.old.values_T[t]) for t in tokens]
        expected = 1 - variance(errors) / (variance(returns) + 1e-5)
        assert found[f"{BY_AGE}{age}"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("versions", "recipe"),
    [
        ([5], recipe_of(4)),
        ([6, 5], recipe_of(0)),
        ([6, 5], recipe_of(4, adv_estimator="grpo")),
    ],
    ids=["tokens of one age", "no tokens can be older", "no critic"],
)
def test_there_is_nothing_to_compare_with(versions, recipe):
    assert explained_by_age(experience_of(versions), STEP, recipe) == {}


def test_an_age_of_equal_returns_has_none():
    experience = experience_of([6, 5])
    old_T = experience.old.batch.weight_version_T == 5
    returns_T = torch.where(old_T, 1.0, experience.returns_T)
    equal = replace(experience, returns_T=returns_T)
    assert explained_by_age(equal, STEP, recipe_of(1)).keys() == {f"{BY_AGE}0"}

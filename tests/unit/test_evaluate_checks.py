"""A recipe of another machine can be evaluated here: only what an evaluation reads is checked."""

from __future__ import annotations

import pytest

from mppo.recipe.errors import ConfigError
from mppo.trainer.start.checked_recipe import concerns_evaluation
from mppo.trainer.start.loading import load_checked

RECIPE = {
    "model": {"path": "builtin:tiny", "dtype": "float32"},
    "data": {
        "train_files": ["nowhere.jsonl"], "max_prompt_length": 16, "max_response_length": 4,
    },
    "actor": {"megatron": {"pipeline_model_parallel_size": 2}},
    "critic": {"path": "nowhere/critic"},
    "trainer": {"n_gpus_per_node": 8, "nnodes": 4},
}  # fmt: skip


def issues(concerns=lambda key: True, **changes) -> set[str]:
    try:
        load_checked({**RECIPE, **changes}, (), 1, concerns=concerns)
    except ConfigError as error:
        return {issue.key for issue in error.issues}
    return set()


def test_layouts_and_files_of_the_job_are_not_asked_for():
    every = issues()
    assert {"critic.path", "data.train_files"} <= every
    assert not any(map(concerns_evaluation, every)), every
    assert issues(concerns_evaluation) == set()


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"path": "nowhere/model"}}, {"rollout": {"temperature": 0}},
        {"reward": {"name": "function", "function": "no.py:score"}},
    ],
)  # fmt: skip
def test_what_an_evaluation_reads_is_checked(changes):
    assert issues(concerns_evaluation, **changes)

"""Selecting sequences: resampling, concatenation and dynamic sampling."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from random_outputs import outputs_of

from mppo.batch.batch import Batch
from mppo.batch.selection import concatenate_batches, select_batch, select_experience
from mppo.recipe.sections.algorithm import (
    AlgorithmConfig,
    PFPPOConfig,
)
from mppo.trainer.advantages import estimate
from mppo.trainer.batch_selection import first_groups, informative_sequences, resample_experience


def test_pf_ppo_resamples_complete_sequences():
    experience = estimate(
        outputs_of([3, 0, 5, 2], scores=[0.0, 0.0, 0.0, 9.0]), AlgorithmConfig(), 0
    )
    drawn = resample_experience(experience, PFPPOConfig(reweight_method="pow"), seed=1)
    assert drawn.old.batch.scores_B.tolist() == [9.0] * 4
    expected = experience.advantages_T[-3:].repeat(4)
    torch.testing.assert_close(drawn.advantages_T, expected)


def _of_episodes(batch: Batch, *episodes: int) -> Batch:
    return replace(batch, episode_B=torch.tensor(episodes))


def test_pf_ppo_draws_episodes_with_all_their_sequences():
    outputs = outputs_of([3, 4, 5, 2], scores=[9.0, 9.0, 9.0, 0.0])
    outputs = replace(outputs, batch=_of_episodes(outputs.batch, 0, 0, 0, 1))
    experience = estimate(outputs, AlgorithmConfig(), 0)
    drawn = resample_experience(experience, PFPPOConfig(reweight_method="pow"), seed=1)
    assert drawn.old.batch.episode_B.tolist() == [0, 0, 0, 1, 1, 1], "drawn twice: two episodes"
    assert drawn.old.batch.response_B.tolist() == [3, 4, 5, 3, 4, 5]


def test_joined_batches_have_different_episodes():
    batch = estimate(outputs_of([3, 0, 5]), AlgorithmConfig(), 0).old.batch
    some = _of_episodes(batch, 7, 7, 9)
    joined = concatenate_batches([select_batch(some, [0, 1]), some, select_batch(some, [2])])
    assert joined.episode_B.tolist() == [0, 0, 1, 1, 2, 3]
    assert joined.episodes.last_E.tolist() == [1, 3, 4, 5]


def test_selecting_and_concatenating_batches():
    experience = estimate(outputs_of([3, 0, 5]), AlgorithmConfig(), 0)
    again = select_experience(experience, [0, 1, 2])
    torch.testing.assert_close(again.old.values_T, experience.old.values_T)
    batch = experience.old.batch
    joined = concatenate_batches([select_batch(batch, [2]), select_batch(batch, [0, 1])])
    assert joined.tokens_T.tolist() == select_batch(batch, [2, 0, 1]).tokens_T.tolist()
    assert joined.cu_seqlens.tolist() == [0, 6, 10, 11]
    with pytest.raises(ValueError, match="at least one batch"):
        concatenate_batches([])


def test_dynamic_sampling_keeps_groups_with_differing_scores():
    scores, group = torch.tensor([1.0, 1, 0, 1, 2]), torch.tensor([5, 5, 3, 3, 9])
    assert informative_sequences(scores, group).tolist() == [2, 3, 4]
    assert informative_sequences(scores[:0], group[:0]).tolist() == []


def test_a_batch_takes_the_first_informative_groups_and_is_filled_up():
    scores = torch.tensor([1.0, 1, 0, 1, 2, 2, 3, 5])
    group = torch.tensor([8, 8, 3, 3, 9, 9, 1, 1])
    assert first_groups(scores, group, 1).tolist() == [2, 3]
    assert first_groups(scores, group, 2).tolist() == [2, 3, 6, 7]
    assert first_groups(scores, group, 3).tolist() == [0, 1, 2, 3, 6, 7]
    assert first_groups(scores, group, 4).tolist() == list(range(8))

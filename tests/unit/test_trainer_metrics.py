"""Metrics of a step, computed without a run."""

from __future__ import annotations

import dataclasses

import torch

from mppo.batch.episode import Episode, EpisodeTokens, with_scores
from mppo.batch.outputs import Outputs
from mppo.batch.packing import pack_episodes
from mppo.batch.prompt import Prompt
from mppo.batch.score import ResponseScore
from mppo.recipe.sections.algorithm import AlgorithmConfig, PFPPOConfig
from mppo.trainer.advantages import estimate
from mppo.trainer.batch_selection import resample_experience
from mppo.trainer.metrics import experience_metrics, mismatch_metrics
from mppo.trainer.validation.validation_stage import chosen_samples, is_sample_step

MISMATCH = "training/rollout_logprob_diff_mean"


def outputs_of(has_actor_logprobs: bool) -> Outputs:
    """Two responses whose log-probabilities are the engine's."""
    tokens = EpisodeTokens((3, 4, 5), (-0.5, -1.0, -0.1))
    episodes = [Episode.sampled(Prompt(i, (1, 2), "", "", ""), tokens, "stop", 0) for i in range(2)]
    batch = pack_episodes(with_scores(episodes, [ResponseScore(1.0), ResponseScore(0.0)]))
    logprobs_T = batch.rollout_logprobs_T
    values_T = torch.zeros_like(logprobs_T)
    return Outputs(batch, logprobs_T, logprobs_T, values_T, has_actor_logprobs)


def test_a_mismatch_that_nobody_computed_is_not_reported_not_even_of_a_resampled_batch():
    computed, taken = outputs_of(True), outputs_of(False)
    assert mismatch_metrics(computed, 1)[MISMATCH] == 0.0
    assert MISMATCH not in mismatch_metrics(taken, 1)
    experience = resample_experience(estimate(taken, AlgorithmConfig(), 0.0), PFPPOConfig(), seed=0)
    # resampling copies tensors, so the flag cannot depend on object identity
    assert experience.old.logprobs_T is not experience.old.batch.rollout_logprobs_T
    assert MISMATCH not in mismatch_metrics(experience.old, 1)
    reported = experience_metrics(experience).keys()
    same = dataclasses.replace(experience, old=dataclasses.replace(computed))
    assert experience_metrics(same).keys() - reported, "the actor's own are reported"


def test_bypass_mode_takes_the_engines_log_probabilities():
    correction = {"rollout_correction": {"bypass_mode": True}}
    algorithm = AlgorithmConfig.model_validate(correction)
    assert not estimate(outputs_of(True), algorithm, 0.0).old.has_actor_logprobs


def test_tables_of_responses_are_shown_at_trls_steps():
    shown = {n: [s for s in range(1, 11) if is_sample_step(s, 10, n)] for n in (None, 0, 3, 99)}
    assert shown == {None: [1, 5, 10], 0: [], 3: [1, 4, 7, 10], 99: list(range(1, 11))}


def test_a_table_has_the_best_and_the_worst_response_and_then_the_first_ones():
    scores = [0.5, 0.0, 1.0, 0.0, 1.0]
    assert chosen_samples(scores, 4) == {2: "best", 3: "worst", 0: "", 1: ""}
    assert chosen_samples([0.5, 0.5], 4) == {0: "best", 1: "worst"}
    assert chosen_samples(scores, 1) == {0: ""}
    assert chosen_samples([1.0], 4) == {0: ""}
    assert chosen_samples(scores, 0) == chosen_samples([], 4) == {}

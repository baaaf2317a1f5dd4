"""The gate of value pretraining, and the explained variance that it reads."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from statistics import variance

import pytest
import torch
from random_outputs import outputs_of

from mppo.planning.residency import WEIGHT_SYNC, used_parts
from mppo.recipe.errors import ConfigError
from mppo.recipe.load import load_recipe
from mppo.recipe.schedule_kind import forward_groups, schedule_kind, update_groups
from mppo.recipe.sections.algorithm import AlgorithmConfig
from mppo.trainer.advantages import estimate
from mppo.trainer.metrics import experience_metrics
from mppo.trainer.value_gate import IN_A_ROW, MEASURES, ValueGate, describe_end, value_gate

BY_TOKEN, BY_EPISODE = MEASURES
STAGE = ("data.task=arithmetic", "trainer.stage=value_pretraining")


def judged(gate, pairs, first=1):
    """The count after each of some batches, given by their two explained variances."""
    rows = [{n: x for n, x in zip(MEASURES, pair) if x is not None} for pair in pairs]
    return [gate.judge(first + i, row)[IN_A_ROW] for i, row in enumerate(rows)]


def test_the_gate_holds_after_batches_in_a_row_that_reach_the_threshold_by_both_measures():
    gate = ValueGate(threshold=0.5, batches=2)
    assert judged(gate, [(0.6, 0.5), (0.9, 0.4), (0.5, 0.7)]) == [1, 0, 1]
    assert not gate.holds
    # equal returns: neither a success nor a failure
    assert judged(gate, [(None, None), (0.8, 0.8)]) == [1, 2]
    assert gate.holds
    resumed = ValueGate(threshold=0.5, batches=2)
    resumed.load_state_dict(gate.state_dict())
    assert resumed.holds


def test_a_replay_holds_its_last_steps_out_in_every_pass():
    gate = ValueGate(threshold=0.5, batches=2, dumps=5)
    assert [gate.holds_out(step) for step in range(1, 11)] == [False, False, False, True, True] * 2
    # what has been learnt is not judged
    assert judged(gate, [(0.9, 0.9)] * 5) == [0, 0, 0, 1, 2]
    assert not ValueGate(0.5, 2).holds_out(5), "fresh responses are new in every step"


def test_the_end_is_told_with_the_next_step():
    recipe = load_recipe(None, [*STAGE, "trainer.default_local_dir=runs/values"])
    metrics = {BY_TOKEN: 0.75, BY_EPISODE: 0.5}
    text = describe_end(ValueGate(0.5, 3, in_a_row=3), recipe, 7, metrics)
    assert "holds after 3 batches" in text
    assert "critic.path=runs/values/critic" in text
    assert "step 7: explained variance 0.750 by token, 0.500 by episode" in text
    text = describe_end(ValueGate(0.5, 3, in_a_row=1), recipe, 7, {})
    for part in ("does not hold", "1 of 3 batches", "undefined"):
        assert part in text


def test_a_replay_that_is_too_short_is_refused(tmp_path):
    recipe = load_recipe(None, [*STAGE, f"trainer.replay={tmp_path}"])
    with pytest.raises(ConfigError, match=r"(?s)value_gate\.batches.*and it has 0"):
        value_gate(recipe)
    assert value_gate(load_recipe(None, ["data.task=arithmetic"])) is None


def test_explained_variance_by_episode_gives_each_episode_one_weight():
    experience = estimate(outputs_of([1, 4, 2], scores=[0.0, 1.0, 2.0]), AlgorithmConfig(), 0.0)
    batch = experience.old.batch
    returns, values = experience.returns_T, experience.old.values_T
    spans = [range(int(a) + 1, int(b)) for a, b in pairwise(batch.cu_seqlens)]

    def explained(episodes):
        weight = {t: 1 / sum(map(len, spans_)) for spans_ in episodes for s in spans_ for t in s}

        def spread(x):
            mean = sum(w * float(x[t]) for t, w in weight.items()) / len(episodes)
            square = sum(w * (float(x[t]) - mean) ** 2 for t, w in weight.items())
            return square / (len(episodes) - 1)

        return 1 - spread(returns - values) / (spread(returns) + 1e-5)

    found = experience_metrics(experience)
    assert found[BY_EPISODE] == pytest.approx(explained([[span] for span in spans]), abs=1e-6)
    inside = [t for span in spans for t in span]
    by_token = variance(float(returns[t] - values[t]) for t in inside)
    by_token /= variance(float(returns[t]) for t in inside) + 1e-5
    assert found[BY_TOKEN] == pytest.approx(1 - by_token, abs=1e-6)
    # the first two sequences are one episode
    joined = dataclasses.replace(batch, episode_B=torch.tensor([0, 0, 1]))
    old = dataclasses.replace(experience.old, batch=joined)
    found = experience_metrics(dataclasses.replace(experience, old=old))
    assert found[BY_EPISODE] == pytest.approx(explained([spans[:2], spans[2:]]), abs=1e-6)


def test_the_actor_has_no_optimizer_and_no_pass_that_nothing_reads():
    recipe = load_recipe(None, STAGE)
    actor, critic = recipe.roles()
    assert (actor.trained, critic.trained) == (False, True)
    assert forward_groups(recipe) == update_groups(recipe) == (("critic",),)
    assert schedule_kind(recipe) == "sequential"
    assert set(used_parts(recipe)[WEIGHT_SYNC]) == {"actor", "critic"}, "the critic is exported"
    for key in (
        "algorithm.use_kl_in_reward=true",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
    ):
        groups = forward_groups(load_recipe(None, [*STAGE, key]))
        assert any("actor" in group for group in groups), key
    kept = load_recipe(None, [*STAGE, "actor.use_kl_loss=true"])
    assert [role.name for role in kept.roles()] == ["actor", "critic"]

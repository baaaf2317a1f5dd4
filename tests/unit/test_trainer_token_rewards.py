"""Rewards of single tokens, from a reward function's result to the advantages."""

from dataclasses import replace

import pytest
import torch

from mppo.algos.masked import sequence_sum
from mppo.algos.reward_normalization import RewardStats
from mppo.batch.episode import Episode, EpisodeTokens, with_scores
from mppo.batch.outputs import Outputs
from mppo.batch.prompt import Prompt
from mppo.batch.selection import concatenate_batches, select_batch
from mppo.batch.shares import pack_at_home
from mppo.hub.builtin import load_tokenizer, resolve_model
from mppo.recipe.sections.algorithm import AlgorithmConfig, ScoreNormalizationConfig
from mppo.recipe.sections.reward import RewardConfig
from mppo.rewards.scorer import Scorer
from mppo.rewards.scores import ModelScore
from mppo.trainer.advantages import estimate, normalize_scores
from mppo.trainer.metrics import experience_metrics

RESULTS = [
    {"score": 8.0, "token_rewards": [(0, 0.5), (2, -0.25)]},
    [0.125, 0.0, -1.0, 2.0],
    3.0,
    {"token_rewards": []},
]
LENGTHS, PROMPT_LENGTHS = [3, 4, 2, 1], [2, 1, 2, 3]
GAMMA, LAM, KL_COEF = 0.9, 0.8, 0.1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(resolve_model("builtin:tiny", tmp_path_factory.mktemp("models")))


def rollout(tokenizer, reward, **settings):
    """Scored responses and their batch."""
    episodes = [
        Episode.sampled(
            Prompt(i // 2, range(1, 1 + prompt), "t", "", "p"),
            EpisodeTokens(range(5, 5 + length), [-0.5] * length),
            "length" if i == 1 else "stop",
            0,
        )
        for i, (prompt, length) in enumerate(zip(PROMPT_LENGTHS, LENGTHS))
    ]
    scorer = Scorer(lambda some: RESULTS[: len(some)], tokenizer, reward, **settings)
    scores = scorer.score(episodes)
    return scores, pack_at_home(with_scores(episodes, scores))


def by_hand(outcomes, token_rewards, kl, values):
    """Rewards and advantages of one response after the other, token by token."""
    rewards, advantages = [], []
    for outcome, own, penalties, states in zip(outcomes, token_rewards, kl, values):
        r = [reward - KL_COEF * each for reward, each in zip(own, penalties)]
        r[-1] += outcome
        later, found = 0.0, []
        for t in reversed(range(len(r))):
            following = states[t + 1] if t + 1 < len(r) else 0.0
            later = r[t] + GAMMA * following - states[t] + GAMMA * LAM * later
            found.insert(0, later)
        rewards += r
        advantages += found
    return rewards, advantages


def test_token_rewards_reach_the_advantages_as_computed_by_hand(tokenizer):
    reward = RewardConfig(clip=2.0, missing_eos_penalty=1.0)
    scores, batch = rollout(tokenizer, reward)
    # the outcome reward is clipped, and lowered without an end; rewards of tokens are not
    outcomes = [2.0, -1.0, 2.0, 0.0]
    token_rewards = [[0.5, 0.0, -0.25], [0.125, 0.0, -1.0, 2.0], [0.0, 0.0], [0.0]]
    assert [each.outcome for each in scores] == outcomes
    assert batch.scores_B.tolist() == [2.25, 0.125, 2.0, 0.0]
    random, inside = torch.Generator().manual_seed(3), batch.response_mask_T > 0
    drawn = [torch.randn(int(inside.sum()), generator=random).double() for _ in range(3)]
    spread = [torch.zeros(len(inside)) for _ in drawn]
    for one, numbers in zip(spread, drawn):
        one[inside] = numbers.float()
    logprobs, reference, values = drawn
    outputs = Outputs(batch, *spread)
    algorithm = AlgorithmConfig(
        use_kl_in_reward=True, gamma=GAMMA, lam=LAM, whiten_advantages=False, kl_penalty="kl"
    )
    experience = estimate(outputs, algorithm, KL_COEF)
    kl = (logprobs - reference).split(LENGTHS)
    split = [[each.tolist() for each in kl], [each.tolist() for each in values.split(LENGTHS)]]
    rewards, advantages = by_hand(outcomes, token_rewards, *split)
    expected = torch.tensor([rewards, advantages])
    got = torch.stack([experience.rewards_T[inside], experience.advantages_T[inside]])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    metrics = experience_metrics(experience)
    assert metrics["critic/score/mean"] == batch.scores_B.mean().item()
    penalty = -KL_COEF * sum(each.sum().item() for each in kl) / 4
    assert metrics["objective/non_score_reward"] == pytest.approx(penalty, abs=1e-5)


def test_an_outcome_estimator_sees_their_sum(tokenizer):
    _, batch = rollout(tokenizer, RewardConfig())
    zeros_T = torch.zeros_like(batch.response_mask_T)
    algorithm = AlgorithmConfig(adv_estimator="dr_grpo", whiten_advantages=False)
    experience = estimate(Outputs(batch, zeros_T, zeros_T, zeros_T), algorithm, 0.0)
    last_T = batch.cu_seqlens[1:] - 1
    # groups of 8.25 and 1.125, and of 3 and 0
    expected = torch.tensor([3.5625, -3.5625, 1.5, -1.5])
    torch.testing.assert_close(experience.advantages_T[last_T], expected)


@pytest.mark.parametrize("mode", ["given", "batch", "group"])
def test_normalised_rewards_have_the_normalised_score_as_their_sum(tokenizer, mode):
    _, batch = rollout(tokenizer, RewardConfig())
    given = {"mean": 1.0, "std": 4.0} if mode == "given" else {}
    config = ScoreNormalizationConfig(mode=mode, **given)
    algorithm = AlgorithmConfig(normalize_scores=config, whiten_advantages=False)
    scaled, _ = normalize_scores(batch, torch.empty(0), algorithm, RewardStats())
    zeros_T = torch.zeros_like(batch.response_mask_T)
    experience = estimate(Outputs(scaled, zeros_T, zeros_T, zeros_T), algorithm, 0.0)
    sums_B = sequence_sum(experience.rewards_T, batch.cu_seqlens)
    torch.testing.assert_close(sums_B, scaled.scores_B)
    scores_B = batch.scores_B
    std = {"given": torch.tensor(4.0), "batch": scores_B.std(), "group": scores_B[:2].std()}[mode]
    assert experience.rewards_T[2].item() == pytest.approx(0.5 / std.item(), abs=1e-5)


def test_token_rewards_follow_their_sequences(tokenizer):
    _, batch = rollout(tokenizer, RewardConfig())
    both = concatenate_batches([batch, replace(batch, group_B=batch.group_B + 9)])
    chosen = select_batch(both, [5, 0])
    expected = [0.0, 0.125, 0.0, -1.0, 2.0, 0.0, 0.0, 0.5, 0.0, -0.25]
    assert chosen.token_rewards_T.tolist() == expected


def test_the_weight_of_the_function_applies_to_token_rewards_too(tokenizer):
    def model(responses):
        return [ModelScore(1.0, 1.0)] * len(responses)

    reward = RewardConfig(weight=0.5)
    scores, _ = rollout(tokenizer, reward, model=model, model_weight=3.0)
    assert list(scores[0].token_rewards) == [0.25, 0.0, -0.125]
    assert [each.outcome for each in scores] == [7.0, 3.0, 4.5, 3.0]
    assert scores[1].score == 3.0 + 0.5 * 1.125

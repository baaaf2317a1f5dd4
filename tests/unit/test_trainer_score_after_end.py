"""TRL's position of the score: one slot after the stop token, with a value of its own."""

from __future__ import annotations

import pytest
import torch
from mini_batch_objectives import value_objective

from mppo.batch.episode import Episode, EpisodeTokens, with_scores
from mppo.batch.outputs import Outputs
from mppo.batch.packing import pack_episodes
from mppo.batch.prompt import Prompt
from mppo.batch.score import ResponseScore
from mppo.recipe.sections.algorithm import AlgorithmConfig
from mppo.recipe.sections.roles import CriticConfig
from mppo.trainer.advantages import estimate
from mppo.trainer.metrics import experience_metrics
from mppo.trainer.targets import value_targets

LIMIT = 6
STOPPED = (True, False, True, True, True)
LENGTHS = (3, 6, 1, 4, 6)
GAMMA, LAM, BETA = 0.9, 0.95, 0.05


def outputs_of(seed: int) -> Outputs:
    """Five responses to prompts of two tokens; of the two with six tokens, one is cut off."""
    random = torch.Generator().manual_seed(seed)
    episodes = [
        Episode.sampled(
            Prompt(i, (7, 8), "", "", ""), EpisodeTokens(range(n), [0.0] * n), reason, 0
        )
        for i, n in enumerate(LENGTHS)
        for reason in ["stop" if STOPPED[i] else "length"]
    ]
    scores = map(ResponseScore, torch.randn(5, generator=random).tolist())
    batch = pack_episodes(with_scores(episodes, list(scores)), LIMIT)
    count = len(batch.tokens_T)
    logprobs_T, ref_T, values_T = torch.randn(3, count, generator=random)
    mask_T = batch.response_mask_T
    return Outputs(batch, logprobs_T * mask_T, ref_T * mask_T, values_T * batch.value_mask_T)


def rows(x_T: torch.Tensor, outputs: Outputs) -> torch.Tensor:
    """States from the first response token on, as rows of 6 padded with zeros on the right."""
    padded = torch.zeros(5, LIMIT, dtype=torch.float64)
    for i, (first, last) in enumerate(
        zip(outputs.batch.cu_seqlens[:-1] + 2, outputs.batch.cu_seqlens[1:])
    ):
        padded[i, : last - first] = x_T[first:last].double()
    return padded


def whiten(x, mask, shift_mean=True):
    mean = x[mask].mean()
    whitened = (x - mean) * torch.rsqrt(x[mask].var() + 1e-8)
    return whitened if shift_mean else whitened + mean


def test_a_slot_follows_every_response_that_stopped_before_the_last_position():
    batch = outputs_of(0).batch
    assert batch.lengths_B.tolist() == [6, 8, 4, 7, 8]
    assert batch.end_mask_T.nonzero()[:, 0].tolist() == [5, 17, 24]
    assert batch.tokens_T[batch.end_mask_T > 0].tolist() == [2, 0, 3]
    assert not (batch.end_mask_T * batch.response_mask_T).any()


@pytest.mark.parametrize("whiten_rewards", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_advantages_and_returns_are_those_of_trls_loop(seed, whiten_rewards):
    outputs = outputs_of(seed)
    algorithm = AlgorithmConfig(
        gamma=GAMMA,
        lam=LAM,
        use_kl_in_reward=True,
        whiten_rewards=whiten_rewards,
        score_after_end=True,
    )
    experience = estimate(outputs, algorithm, BETA)
    # PPOTrainer.train: sequence_lengths is the last token's index, p1 the next one
    lengths = torch.tensor(LENGTHS) - 1
    index = torch.arange(LIMIT).expand(5, LIMIT)
    mask, mask_p1 = index <= lengths[:, None], index <= lengths[:, None] + 1
    values = rows(outputs.values_T, outputs)
    rewards = -BETA * rows(outputs.logprobs_T - outputs.ref_logprobs_T, outputs)
    end = torch.where(lengths + 1 < LIMIT, lengths + 1, lengths)
    rewards[torch.arange(5), end] += outputs.batch.scores_B.double()
    if whiten_rewards:
        rewards = whiten(rewards, mask_p1, shift_mean=False).masked_fill(~mask_p1, 0)
    lastgaelam, reversed_advantages = torch.zeros(5).double(), []
    for t in reversed(range(LIMIT)):
        nextvalues = values[:, t + 1] if t < LIMIT - 1 else 0.0
        delta = rewards[:, t] + GAMMA * nextvalues - values[:, t]
        lastgaelam = delta + GAMMA * LAM * lastgaelam
        reversed_advantages.append(lastgaelam)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    returns = (advantages + values).masked_fill(~mask_p1, 0)
    advantages = whiten(advantages, mask).masked_fill(~mask, 0)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(rows(experience.advantages_T, outputs), advantages, **close)
    torch.testing.assert_close(rows(experience.returns_T, outputs), returns, **close)
    new_T = outputs.values_T + 0.3 * outputs.batch.value_mask_T
    critic = CriticConfig(cliprange_value=0.2)
    loss, _ = value_objective(new_T, value_targets(experience, range(5), critic, LIMIT), critic)
    new = rows(new_T, outputs)
    clipped = torch.clamp(new, values - 0.2, values + 0.2)
    vf = 0.5 * torch.maximum((new - returns).square(), (clipped - returns).square())
    assert loss.item() == pytest.approx(vf[mask_p1].mean().item(), rel=1e-5)


def test_rejecting_a_response_rejects_its_slot():
    outputs = outputs_of(0)
    algorithm = AlgorithmConfig(score_after_end=True, mask_truncated=True)
    weight_T = estimate(outputs, algorithm, 0.0).loss_weight_T
    batch = outputs.batch
    assert torch.equal(weight_T[:6], batch.value_mask_T[:6])
    assert not weight_T[6:14].any()
    assert torch.equal(weight_T[14:], batch.value_mask_T[14:])


def test_metrics_count_responses_without_their_slots():
    metrics = experience_metrics(
        estimate(outputs_of(0), AlgorithmConfig(score_after_end=True), 0.0)
    )
    assert metrics["prompt_length/mean"] == 2.0
    assert metrics["response_length/mean"] == sum(LENGTHS) / 5
    assert metrics["val/num_eos_tokens"] == 4.0
    assert metrics["critic/score/mean"] == pytest.approx(metrics["critic/rewards/mean"], rel=1e-5)

"""GAE and reward-to-go."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo.algos.gae import (
    gae,
    length_adaptive_lambda,
    reward_to_go,
    turn_gae,
    turn_starts,
)

unhurried = settings(max_examples=40)


def reference_gae(rewards, values, mask, cu_seqlens, gamma, lam):
    """The recursion as the paper writes it, token by token; lam is a list, one per sequence."""
    advantages = torch.zeros_like(values)
    for b in range(len(cu_seqlens) - 1):
        next_value = next_advantage = 0.0
        for t in reversed(range(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))):
            if mask[t] > 0:
                delta = rewards[t] + gamma * next_value - values[t]
                next_advantage = delta + gamma * lam[b] * next_advantage
                next_value = values[t]
                advantages[t] = next_advantage
    return advantages


@st.composite
def flat_batches(draw, runs_only=False):
    """cu_seqlens, mask, rewards and values (float64) of up to six sequences, empties included."""
    lengths = draw(st.lists(st.integers(0, 80), min_size=1, max_size=6))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    total = int(cu_seqlens[-1])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.zeros(total, dtype=torch.float64)
    for start, length in zip(cu_seqlens.tolist(), lengths):
        first = draw(st.integers(0, length))
        mask[start + first : start + draw(st.integers(first, length))] = 1
    if not runs_only:
        mask *= torch.rand(total, generator=generator) > 0.3
    rewards = torch.randn(total, generator=generator, dtype=torch.float64) * mask
    values = torch.randn(total, generator=generator, dtype=torch.float64) * mask
    return cu_seqlens, mask, rewards, values


def test_gae_equals_numbers_worked_out_by_hand():
    # prompt of 1, response of 3; gamma 0.5, lam 0.5; V after the end is 0
    # delta = [0 + .5*2 - 1, 0 + .5*3 - 2, 4 + 0 - 3] = [0, -.5, 1]
    # A_3 = 1; A_2 = -.5 + .25*1 = -.25; A_1 = 0 + .25*-.25 = -.0625
    values = torch.tensor([0.0, 1.0, 2.0, 3.0])
    rewards = torch.tensor([0.0, 0.0, 0.0, 4.0])
    mask = torch.tensor([0.0, 1.0, 1.0, 1.0])
    advantages = gae(rewards, values, mask, torch.tensor([0, 4]), 0.5, 0.5)
    torch.testing.assert_close(advantages, torch.tensor([0.0, -0.0625, -0.25, 1.0]))


def test_gae_of_one_token_is_reward_minus_value():
    advantages = gae(
        torch.tensor([2.0]), torch.tensor([0.5]), torch.ones(1), torch.tensor([0, 1]), 0.9, 0.9
    )
    assert advantages.tolist() == [1.5]


def test_gae_skips_masked_tokens_inside_a_response():
    # tokens 1 and 2 are tool output: the state after token 0 is the one before token 3
    values = torch.tensor([1.0, 0.0, 0.0, 2.0])
    rewards = torch.tensor([0.0, 0.0, 0.0, 5.0])
    mask = torch.tensor([1.0, 0.0, 0.0, 1.0])
    advantages = gae(rewards, values, mask, torch.tensor([0, 4]), 1.0, 0.5)
    # A_3 = 5 - 2 = 3; A_0 = (0 + 2 - 1) + .5 * 3 = 2.5
    assert advantages.tolist() == [2.5, 0.0, 0.0, 3.0]


@unhurried
@given(flat_batches(), st.sampled_from([(1.0, 1.0), (0.99, 0.95), (0.0, 0.5), (1.0, 0.0)]))
def test_gae_equals_the_recursion_on_any_mask(batch, discounts):
    cu_seqlens, mask, rewards, values = batch
    gamma, lam = discounts
    expected = reference_gae(rewards, values, mask, cu_seqlens, gamma, [lam] * 6)
    torch.testing.assert_close(gae(rewards, values, mask, cu_seqlens, gamma, lam), expected)


@unhurried
@given(flat_batches(runs_only=True))
def test_gae_equals_the_recursion_where_responses_are_runs(batch):
    cu_seqlens, mask, rewards, values = batch
    expected = reference_gae(rewards, values, mask, cu_seqlens, 0.98, [0.9] * 6)
    torch.testing.assert_close(gae(rewards, values, mask, cu_seqlens, 0.98, 0.9), expected)


@unhurried
@given(flat_batches())
def test_gae_takes_a_lambda_for_each_sequence(batch):
    cu_seqlens, mask, rewards, values = batch
    lam = torch.linspace(0.1, 0.9, len(cu_seqlens) - 1)
    expected = reference_gae(rewards, values, mask, cu_seqlens, 0.9, lam.tolist())
    torch.testing.assert_close(gae(rewards, values, mask, cu_seqlens, 0.9, lam), expected)


@unhurried
@given(flat_batches(runs_only=True), st.integers(0, 5))
def test_gae_does_not_depend_on_other_sequences(batch, which):
    cu_seqlens, mask, rewards, values = batch
    which %= len(cu_seqlens) - 1
    part = slice(int(cu_seqlens[which]), int(cu_seqlens[which + 1]))
    alone = torch.tensor([0, part.stop - part.start])
    expected = gae(rewards[part], values[part], mask[part], alone, 0.9, 0.8)
    complete = gae(rewards, values, mask, cu_seqlens, 0.9, 0.8)
    torch.testing.assert_close(complete[part], expected)


def test_long_sums_keep_float32_precision():
    # 200,000 ones: with gamma = lam = 1 and no values the advantage counts the tokens to the end
    n = 200_000
    advantages = gae(torch.ones(n), torch.zeros(n), torch.ones(n), torch.tensor([0, n]), 1.0, 1.0)
    torch.testing.assert_close(advantages, torch.arange(n, 0, -1, dtype=torch.float32))


def test_an_empty_mask_gives_zeros():
    cu_seqlens = torch.tensor([0, 0, 3, 3])
    zeros = torch.zeros(3)
    assert gae(zeros, zeros, zeros, cu_seqlens, 1.0, 1.0).tolist() == [0, 0, 0]
    empty = torch.zeros(0)
    assert len(gae(empty, empty, empty, torch.tensor([0, 0]), 1.0, 1.0)) == 0


def test_reward_to_go_is_the_discounted_sum():
    rewards = torch.tensor([0.0, 1.0, 2.0, 4.0, 7.0])
    mask = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
    result = reward_to_go(rewards, mask, torch.tensor([0, 4, 5]), 0.5)
    assert result.tolist() == [0.0, 3.0, 4.0, 4.0, 7.0]


def test_length_adaptive_lambda():
    lam = length_adaptive_lambda(torch.tensor([0.0, 10.0, 100.0, 2000.0]), 0.05)
    # 1 - 1 / max(alpha n, 1): 0 for the empty and the short ones
    torch.testing.assert_close(lam, torch.tensor([0.0, 0.0, 0.8, 0.99], dtype=torch.float64))


def reference_turn_gae(rewards, values, mask, cu_seqlens, gamma, lam):
    """Turn-PPO: one step a turn, with its summed reward and the value before its first token."""
    advantages = torch.zeros_like(values)
    for b in range(len(cu_seqlens) - 1):
        turns = []
        for t in range(int(cu_seqlens[b]), int(cu_seqlens[b + 1])):
            if mask[t] > 0:
                if turns and turns[-1][-1] == t - 1:
                    turns[-1].append(t)
                else:
                    turns.append([t])
        next_value = next_advantage = 0.0
        for turn in reversed(turns):
            delta = sum(rewards[t] for t in turn) + gamma * next_value - values[turn[0]]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[turn[0]]
            for t in turn:
                advantages[t] = next_advantage
    return advantages


@unhurried
@given(flat_batches(), st.floats(0, 1), st.floats(0, 1))
def test_turn_gae_equals_a_loop_over_turns(batch, gamma, lam):
    cu_seqlens, mask, rewards, values = batch
    starts = turn_starts(mask, cu_seqlens)
    actual = turn_gae(rewards, values, mask, starts, cu_seqlens, gamma, lam)
    expected = reference_turn_gae(rewards, values, mask, cu_seqlens, gamma, lam)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_turns_start_after_a_gap_and_at_the_beginning_of_a_sequence():
    # the last token of one sequence and the first one of the next are both of a response
    mask = torch.tensor([0.0, 1, 1, 0, 1, 1, 1, 0, 0, 1])
    starts = turn_starts(mask, torch.tensor([0, 5, 5, 10]))
    assert starts.tolist() == [0, 1, 0, 0, 1, 1, 0, 0, 0, 1]
    assert turn_starts(mask[:0], torch.tensor([0, 0])).tolist() == []


def test_one_turn_is_one_step_and_single_tokens_are_gaes():
    mask, cu_seqlens = torch.tensor([0.0, 1, 1, 1]), torch.tensor([0, 4])
    rewards, values = torch.tensor([0.0, 1, 0, 2]), torch.tensor([0.0, 0.5, 9, 9])
    starts = turn_starts(mask, cu_seqlens)
    one = turn_gae(rewards, values, mask, starts, cu_seqlens, 0.9, 0.9)
    assert one.tolist() == [0.0, 2.5, 2.5, 2.5]
    apart = torch.tensor([1.0, 0, 1, 0, 1])
    rewards, values, bounds = torch.rand(5), torch.rand(5), torch.tensor([0, 5])
    torch.testing.assert_close(
        turn_gae(rewards, values, apart, turn_starts(apart, bounds), bounds, 0.9, 0.8),
        gae(rewards, values, apart, bounds, 0.9, 0.8),
    )

"""Episodes become one flat batch, and compare by value."""

from dataclasses import replace

import torch

from mppo.batch.episode import NO_WEIGHTS, Episode, EpisodeTokens, with_scores
from mppo.batch.packing import pack_episodes
from mppo.batch.prompt import Prompt
from mppo.batch.score import ResponseScore

PROMPT = Prompt(4, (5, 6), "t", "", "")
TOKENS = EpisodeTokens((7, 8, 9), (-0.5, -0.25, -2.0))
STOPPED = Episode.sampled(PROMPT, TOKENS, "stop", 3, ((1, 1), (2, 1)))
EMPTY = Episode.sampled(Prompt(1, (5,), "t", "", ""), EpisodeTokens((), ()), "abort", 3)
CUT = Episode.sampled(PROMPT, EpisodeTokens((9, 8, 7, 6), (-1.0,) * 4), "length", 3)


def test_packed_tokens_masks_log_probabilities_and_versions():
    scores = [ResponseScore(score) for score in (1.0, 0.0, 0.5)]
    batch = pack_episodes(with_scores([STOPPED, EMPTY, CUT], scores), end_slots_below=4)
    assert batch.scores_B.tolist() == [1.0, 0.0, 0.5]
    assert batch.tokens_T.tolist() == [5, 6, 7, 8, 9, 9, 5, 5, 6, 9, 8, 7, 6]
    assert batch.cu_seqlens.tolist() == [0, 6, 7, 13]
    assert batch.response_mask_T.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]
    assert batch.end_mask_T.tolist() == [0] * 5 + [1] + [0] * 7
    assert batch.rollout_logprobs_T.tolist() == (
        [0.0, 0.0, -0.5, -0.25, -2.0, 0.0, 0.0, 0.0, 0.0] + [-1.0] * 4
    )
    assert batch.weight_version_T.tolist() == [-1, -1, 1, 2, 3, -1, -1, -1, -1, 3, 3, 3, 3]
    assert batch.truncated_B.tolist() == [False, True, True]
    assert batch.group_B.tolist() == [4, 1, 4]
    assert [batch.tokens_T.dtype, batch.weight_version_T.dtype] == [torch.int64] * 2
    assert [batch.response_mask_T.dtype, batch.rollout_logprobs_T.dtype] == [torch.float32] * 2


def test_an_episode_of_several_sequences_is_packed_sequence_by_sequence():
    summary = replace(PROMPT, token_ids=torch.tensor([4], dtype=torch.int32))
    left = Episode.sampled(summary, EpisodeTokens((1, 2), (-1.0, -1.0)), "stop", 2)
    whole = replace(STOPPED, earlier=(EMPTY, left), score=ResponseScore(1.0))
    batch = pack_episodes([replace(CUT, score=ResponseScore(0.5)), whole])
    assert batch.tokens_T.tolist() == [5, 6, 9, 8, 7, 6, 5, 4, 1, 2, 5, 6, 7, 8, 9]
    assert batch.lengths_B.tolist() == [6, 1, 3, 5]
    assert batch.episode_B.tolist() == [0, 1, 1, 1]
    assert batch.scores_B.tolist() == [0.5, 1.0, 1.0, 1.0]
    index = batch.episodes
    assert (index.has_branches, index.last_E.tolist()) == (True, [0, 3])
    assert index.sum(batch.response_B).tolist() == [4, 5]
    assert index.sequences([1, 0]) == [1, 2, 3, 0]


def test_values_of_an_episode_are_tensors_whatever_they_were_made_of():
    assert STOPPED.here.ids.dtype == PROMPT.token_ids.dtype == torch.int32
    assert STOPPED.here.logprobs.dtype == torch.float32
    assert STOPPED.parts == ((1, 1), (2, 1), (3, 1))
    assert EMPTY.parts == ((3, 0),)


def test_episodes_compare_by_value():
    tokens = replace(TOKENS, ids=torch.tensor([7, 8, 9]))
    same = replace(STOPPED, prompt=replace(PROMPT), tokens=tokens)
    assert same == STOPPED
    assert replace(same, tokens=replace(TOKENS, ids=(7, 8, 8))) != STOPPED
    assert replace(same, prompt=replace(PROMPT, token_ids=(5,))) != STOPPED
    assert replace(same, tokens=replace(TOKENS, experts=torch.zeros(4, 1, 1))) != STOPPED


def test_tokens_of_an_environment_have_no_mask_and_no_weights():
    parts = ((3, 2), (NO_WEIGHTS, 2))
    tokens = EpisodeTokens((7, 8, 1, 2, 9), (-0.5, -0.25, 0, 0, -2))
    talk = Episode.sampled(PROMPT, tokens, "stop", 3, parts)
    assert (talk.length, talk.inserted) == (5, 2)
    rewards = ResponseScore(0.0, token_rewards=[0.0, 1.0, 0.5, 0.25, 2.0])
    batch = pack_episodes(with_scores([STOPPED, talk], [ResponseScore(1.0), rewards]), 9)
    assert batch.response_mask_T.tolist()[6:] == [0, 0, 1, 1, 0, 0, 1, 0]
    assert batch.end_mask_T.tolist()[6:] == [0] * 7 + [1]
    assert batch.weight_version_T.tolist()[6:] == [-1, -1, 3, 3, -1, -1, 3, -1]
    # the reward of an environment's token belongs to the token that led to it
    assert batch.token_rewards_T.tolist()[6:] == [0, 0, 0, 1.75, 0, 0, 2, 0]
    assert batch.response_B.tolist() == [3, 3]
    assert batch.inserted_B.tolist() == [0, 2]
    assert batch.prompt_B.tolist() == [2, 2]
    assert batch.answer_B.tolist() == [3, 5]


def test_a_batch_without_token_rewards_stores_none():
    batch = pack_episodes([STOPPED, CUT])
    assert batch.token_rewards_T.shape == batch.response_mask_T.shape
    assert batch.token_rewards_T.untyped_storage().nbytes() == 4, "one number for all tokens"


def test_a_sequence_without_a_response_lacks_no_experts():
    chosen = torch.arange(4, dtype=torch.int16).view(4, 1, 1)
    routed = STOPPED.with_experts(chosen)
    packed = pack_episodes(with_scores([EMPTY, routed], [ResponseScore(0.0)] * 2))
    assert packed.routed_experts_T.flatten().tolist() == [-1, 0, 1, 2, 3, -1]
    lacking = pack_episodes(with_scores([CUT, routed], [ResponseScore(0.0)] * 2))
    assert lacking.routed_experts_T.shape[1:] == (0, 0)

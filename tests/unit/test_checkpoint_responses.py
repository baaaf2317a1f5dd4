"""A checkpoint stores responses for later steps; they are used if they match the request."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mppo.batch.episode import Episode, EpisodesBySample, EpisodeTokens, held
from mppo.batch.prompt import Prompt
from mppo.checkpoint import responses
from mppo.recipe.sections.rollout import SamplingConfig
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.response_gather import left_over

PROMPTS = [Prompt(uid, (5, 6, uid), "task", "4", "2 + 2?", {"level": uid}) for uid in (7, 8, 9)]
EXPERTS = torch.arange(5 * 2 * 2, dtype=torch.int16).view(5, 2, 2)
BROKEN_OFF = Episode.sampled(
    PROMPTS[0], EpisodeTokens((11, 12, 13), (-0.5, -0.25, -2.0)), "abort", 4, ((2, 1),)
)
STOPPED = Episode.sampled(
    PROMPTS[0], EpisodeTokens((14, 15), (-1.0, -3.5), EXPERTS[1:5]), "stop", 4
)
FULL = Episode.sampled(PROMPTS[2], EpisodeTokens((16, 17, 18, 19), (-1.0,) * 4), "length", 3)
PARTIAL = {(7, 0): BROKEN_OFF, (7, 1): STOPPED, (9, 1): FULL}


def request(resumable: EpisodesBySample, max_tokens: int = 4, prompts=PROMPTS) -> GenerationRequest:
    return GenerationRequest(prompts, SamplingConfig(n=2), max_tokens, seed=0, resumable=resumable)


@pytest.mark.parametrize("name", [responses.file_of_rank(0), "responses.safetensors"])
def test_responses_are_read_back_as_saved(tmp_path, name):
    """The second name is that of checkpoints in which one rank saved all responses."""
    (tmp_path / name).write_bytes(responses.to_bytes(PARTIAL))
    known = request(responses.load_responses(tmp_path)).resumed()
    assert list(known) == [0, 1, 5]
    assert torch.equal(known[1].here.experts, EXPERTS[1:5])
    assert known[1].here.experts.dtype == torch.int16
    assert known[1].routed == EXPERTS[1:5].shape
    assert known[0] == BROKEN_OFF
    assert known[0].parts == ((2, 1), (4, 2))
    assert known[1] == STOPPED
    assert known[5] == FULL


@pytest.mark.parametrize("world", [1, 2, 5])
def test_any_number_of_ranks_resumes_what_two_ranks_saved(tmp_path, world):
    kept = list(PARTIAL.items())
    for rank, part in enumerate((kept[:1], kept[1:])):
        file = tmp_path / responses.file_of_rank(rank)
        file.write_bytes(responses.to_bytes(dict(part)))
    loaded = [responses.load_responses(tmp_path, rank, world) for rank in range(world)]
    known = [{k: each.elsewhere(each.home) for k, each in found.items()} for found in loaded]
    assert list(known[0]) == list(PARTIAL)
    for rank, found in enumerate(loaded):
        assert known[rank] == known[0]
        assert list(held(found)) == [k for k, each in known[0].items() if each.home == rank]
    everything = known[0] | {k: each for found in loaded for k, each in held(found).items()}
    resumed = request(everything).resumed()
    assert [replace(resumed[place], home=0) for place in (0, 1, 5)] == list(PARTIAL.values())
    if world > 1:
        sizes = [sum(each.length for each in held(found).values()) for found in loaded]
        assert max(sizes) < sum(sizes)


def test_a_checkpoint_without_the_file_has_no_responses(tmp_path):
    assert not responses.load_responses(tmp_path)


def test_responses_that_do_not_match_the_request_are_ignored():
    short = request(PARTIAL, max_tokens=3).resumed()
    assert list(short) == [1], "too long, or no token left to draw"
    changed = [replace(PROMPTS[0], token_ids=(5, 6)), *PROMPTS[1:]]
    again = request(PARTIAL, prompts=changed).resumed()
    assert list(again) == [5], "the prompt is another one now"


def test_left_over_responses_are_kept_and_collected_ones_are_not():
    nothing_yet = Episode.sampled(PROMPTS[0], EpisodeTokens((), ()), "abort", 4)
    found = {0: nothing_yet, 1: STOPPED, 5: FULL}
    left = left_over(request({(3, 0): FULL}), found, taken=[2])
    assert left == {(7, 1): STOPPED}

"""A checkpoint stores responses for later steps; they are used if they match the request."""

from __future__ import annotations

from dataclasses import replace

import torch

from mppo.batch import Prompt, ResponsesBySample, Trajectory
from mppo.checkpoint import responses
from mppo.config.sections.rollout import SamplingConfig
from mppo.responses import ResponseRow, Responses
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.response_gather import left_over

PROMPTS = [Prompt(uid, (5, 6, uid), "task", "4", "2 + 2?", {"level": uid}) for uid in (7, 8, 9)]
EXPERTS = torch.arange(5 * 2 * 2, dtype=torch.int16).view(5, 2, 2)
BROKEN_OFF = Trajectory(PROMPTS[0], (11, 12, 13), (-0.5, -0.25, -2.0), "abort", 4, None, ((2, 1),))
STOPPED = Trajectory(PROMPTS[0], (14, 15), (-1.0, -3.5), "stop", 4, EXPERTS[1:5])
FULL = Trajectory(PROMPTS[2], (16, 17, 18, 19), (-1.0,) * 4, "length", 3)
PARTIAL: ResponsesBySample = {(7, 0): BROKEN_OFF, (7, 1): STOPPED, (9, 1): FULL}


def through_a_file(partial: ResponsesBySample, folder) -> ResponsesBySample:
    (folder / responses.FILE).write_bytes(responses.to_bytes(partial))
    return responses.load_responses(folder)


def request(
    resumable: ResponsesBySample, max_tokens: int = 4, prompts=PROMPTS
) -> GenerationRequest:
    return GenerationRequest(prompts, SamplingConfig(n=2), max_tokens, seed=0, resumable=resumable)


def test_responses_are_read_back_as_saved(tmp_path):
    known = request(through_a_file(PARTIAL, tmp_path)).resumed()
    assert list(known) == [0, 1, 5]
    assert torch.equal(known[1].routed_experts, EXPERTS[1:5])
    assert known[1].routed_experts.dtype == torch.int16
    assert known[0] == BROKEN_OFF
    assert known[0].weight_versions.tolist() == [2, 4, 4]
    assert replace(known[1], routed_experts=None) == replace(STOPPED, routed_experts=None)
    assert known[5] == FULL


def test_a_checkpoint_without_the_file_has_no_responses(tmp_path):
    assert responses.load_responses(tmp_path) == {}


def test_responses_that_do_not_match_the_request_are_ignored():
    assert list(request(PARTIAL, max_tokens=3).resumed()) == [1], (
        "too long, or no token left to draw"
    )
    changed = [replace(PROMPTS[0], token_ids=(5, 6)), *PROMPTS[1:]]
    assert list(request(PARTIAL, prompts=changed).resumed()) == [5], "the prompt is another one now"


def test_left_over_responses_are_kept_and_collected_ones_are_not():
    nothing_yet = replace(BROKEN_OFF, response_ids=(), logprobs=())
    found = {0: nothing_yet, 1: STOPPED, 5: FULL}
    rows = {place: ResponseRow.of(each, home=0) for place, each in found.items()}
    left = left_over(request({(3, 0): FULL}), Responses(rows, found), 1, None, taken=[2])
    assert left == {(7, 1): STOPPED}

"""A checkpoint stores responses for later steps; they are used if they match the request."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mppo.batch import Prompt, Trajectory
from mppo.checkpoint import responses
from mppo.config.sections.rollout import SamplingConfig
from mppo.responses import ResponseRow, Responses, ResponsesBySample
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.response_gather import left_over

PROMPTS = [Prompt(uid, (5, 6, uid), "task", "4", "2 + 2?", {"level": uid}) for uid in (7, 8, 9)]
EXPERTS = torch.arange(5 * 2 * 2, dtype=torch.int16).view(5, 2, 2)
BROKEN_OFF = Trajectory(PROMPTS[0], (11, 12, 13), (-0.5, -0.25, -2.0), "abort", 4, None, ((2, 1),))
STOPPED = Trajectory(PROMPTS[0], (14, 15), (-1.0, -3.5), "stop", 4, EXPERTS[1:5])
FULL = Trajectory(PROMPTS[2], (16, 17, 18, 19), (-1.0,) * 4, "length", 3)
PARTIAL = {(7, 0): BROKEN_OFF, (7, 1): STOPPED, (9, 1): FULL}


def at_home(partial: dict[tuple[int, int], Trajectory]) -> ResponsesBySample:
    rows = {key: ResponseRow.of(each, 0) for key, each in partial.items()}
    return ResponsesBySample(rows, partial)


def request(
    resumable: ResponsesBySample, max_tokens: int = 4, prompts=PROMPTS
) -> GenerationRequest:
    return GenerationRequest(prompts, SamplingConfig(n=2), max_tokens, seed=0, resumable=resumable)


@pytest.mark.parametrize("name", [responses.file_of_rank(0), "responses.safetensors"])
def test_responses_are_read_back_as_saved(tmp_path, name):
    """The second name is that of checkpoints in which one rank saved all responses."""
    (tmp_path / name).write_bytes(responses.to_bytes(PARTIAL))
    found = request(responses.load_responses(tmp_path)).resumed()
    known = found.held
    assert list(known) == list(found.rows) == [0, 1, 5]
    assert found.rows == {key: ResponseRow.of(each, 0) for key, each in known.items()}
    assert torch.equal(known[1].routed_experts, EXPERTS[1:5])
    assert known[1].routed_experts.dtype == torch.int16
    assert known[0] == BROKEN_OFF
    assert known[0].weight_versions.tolist() == [2, 4, 4]
    assert replace(known[1], routed_experts=None) == replace(STOPPED, routed_experts=None)
    assert known[5] == FULL


@pytest.mark.parametrize("world", [1, 2, 5])
def test_any_number_of_ranks_resumes_what_two_ranks_saved(tmp_path, world):
    kept = list(PARTIAL.items())
    for rank, part in enumerate((kept[:1], kept[1:])):
        file = tmp_path / responses.file_of_rank(rank)
        file.write_bytes(responses.to_bytes(dict(part)))
    loaded = [responses.load_responses(tmp_path, rank, world) for rank in range(world)]
    rows = loaded[0].rows
    assert list(rows) == list(PARTIAL)
    for rank, mine in enumerate(loaded):
        assert mine.rows == rows
        assert list(mine.held) == [key for key, row in rows.items() if row.home == rank]
    held = request(
        ResponsesBySample(rows, {k: t for mine in loaded for k, t in mine.held.items()})
    ).resumed()
    assert [held.held[place] for place in (0, 1, 5)] == list(PARTIAL.values())
    if world > 1:
        sizes = [sum(t.length for t in mine.held.values()) for mine in loaded]
        assert max(sizes) < sum(sizes)


def test_a_checkpoint_without_the_file_has_no_responses(tmp_path):
    assert not responses.load_responses(tmp_path).rows


def test_responses_that_do_not_match_the_request_are_ignored():
    partial = at_home(PARTIAL)
    assert list(request(partial, max_tokens=3).resumed().held) == [1], (
        "too long, or no token left to draw"
    )
    changed = [replace(PROMPTS[0], token_ids=(5, 6)), *PROMPTS[1:]]
    again = request(partial, prompts=changed).resumed()
    assert list(again.rows) == [5], "the prompt is another one now"


def test_left_over_responses_are_kept_and_collected_ones_are_not():
    nothing_yet = replace(BROKEN_OFF, response_ids=(), logprobs=())
    found = {0: nothing_yet, 1: STOPPED, 5: FULL}
    rows = {place: ResponseRow.of(each, home=0) for place, each in found.items()}
    left = left_over(request(at_home({(3, 0): FULL})), Responses(rows, found), taken=[2])
    assert left == at_home({(7, 1): STOPPED})

"""From the servers' answers to micro-batches, Python's work does not grow with the tokens."""

from __future__ import annotations

import base64
import gc
import json
import sys
from itertools import count

import pytest
import torch

from mppo.batch.episode import with_scores
from mppo.batch.outputs import Outputs
from mppo.batch.prompt import Prompt
from mppo.batch.score import ResponseScore
from mppo.batch.shares import pack_at_home, share_out
from mppo.models.microbatch import cut
from mppo.recipe.sections.algorithm import AlgorithmConfig
from mppo.recipe.sections.roles import ActorConfig, CriticConfig
from mppo.recipe.sections.rollout import SamplingConfig
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.sglang.generation import add_answers
from mppo.rollout.sglang.server_response import RoutingShape, parse_responses
from mppo.trainer.advantages import estimate
from mppo.trainer.metrics import experience_metrics, mismatch_metrics
from mppo.trainer.targets import policy_targets, value_targets

SAMPLES, PROMPT, LONGEST = 4, 16, 8000
ROUTING = RoutingShape(layers=3, experts=2)
STEPS_PER_TOKEN = 1.0
"""Instructions of Python's interpreter: a text is converted some 3,000 tokens at a time, while a
loop over tokens has several for each."""
OBJECTS_PER_TOKEN = 0.01


def body(length: int) -> bytes:
    """SGLang's answer with responses of this length."""
    random = torch.Generator().manual_seed(0)
    answers = []
    for _ in range(SAMPLES):
        ids = torch.randint(1000, 9000, (length,), generator=random).tolist()
        logprobs = torch.randn(length, generator=random).abs().neg().tolist()
        routed = (PROMPT + length - 1) * ROUTING.layers * ROUTING.experts
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": "3",
            "output_token_logprobs": [(x, i, None) for x, i in zip(logprobs, ids)],
            "routed_experts": base64.b64encode(bytes(4 * routed)).decode(),
        }
        answers.append({"text": "", "output_ids": ids, "meta_info": meta})
    return json.dumps(answers, separators=(",", ":")).encode()


def micro_batches(text: bytes) -> list[object]:
    """What a rank keeps of one answer, from its text to the micro-batches of an update."""
    answers = dict(enumerate(parse_responses(text)))
    prompt = Prompt(0, torch.arange(PROMPT), "", "", "")
    request = GenerationRequest([prompt], SamplingConfig(n=SAMPLES), LONGEST, seed=0)
    episodes = list(add_answers({}, answers, request, ROUTING, 1).values())
    scores = [ResponseScore(0.5 * i) for i in range(SAMPLES)]
    packed = pack_at_home(with_scores(episodes, scores), LONGEST)
    batch = share_out(packed, num_experts=16)
    logprobs_T = batch.rollout_logprobs_T
    outputs = Outputs(batch, logprobs_T, 0.9 * logprobs_T, 0.1 * logprobs_T)
    experience = estimate(outputs, AlgorithmConfig(use_kl_in_reward=True), 0.1)
    everything = range(SAMPLES)
    return [
        episodes,
        experience,
        experience_metrics(experience),
        mismatch_metrics(outputs, step=4),
        policy_targets(experience, everything, ActorConfig(), LONGEST),
        value_targets(experience, everything, CriticConfig(), LONGEST),
        *(cut(batch, [i], 1, batch.response_mask_T) for i in everything),
    ]


def steps_and_objects(text: bytes) -> tuple[int, int]:
    """Instructions that Python's interpreter executes on the path, and the objects that stay."""
    steps = count()

    def traced(frame, event: str, argument):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            next(steps)
        return traced

    gc.collect()
    before = sys.getallocatedblocks()
    tracing = sys.gettrace()
    sys.settrace(traced)
    try:
        kept = micro_batches(text)
    finally:
        sys.settrace(tracing)
    gc.collect()
    objects = sys.getallocatedblocks() - before
    assert kept
    return next(steps), objects


@pytest.fixture(scope="module")
def grown() -> tuple[int, int, int]:
    """Tokens, instructions and objects by which long responses exceed short ones."""
    short, long = body(500), body(4500)
    steps_and_objects(short)  # what is made once is not counted
    before, after = steps_and_objects(short), steps_and_objects(long)
    assert before[0] > 1000
    return SAMPLES * (4500 - 500), after[0] - before[0], after[1] - before[1]


def test_no_instruction_is_executed_for_a_token(grown) -> None:
    tokens, steps, _ = grown
    assert steps < STEPS_PER_TOKEN * tokens


def test_no_object_is_kept_for_a_token(grown) -> None:
    tokens, _, objects = grown
    assert objects < OBJECTS_PER_TOKEN * tokens

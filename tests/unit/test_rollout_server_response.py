"""Answers to ``/generate`` are read exactly; what no sampler returns is refused with the server."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hostile_server import hostile_server, says
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo.batch.episode import Episode
from mppo.batch.prompt import Prompt
from mppo.recipe.sections.rollout import RolloutConfig, SamplingConfig
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.sglang.fleet import Fleet
from mppo.rollout.sglang.generation import SGLangGeneration
from mppo.rollout.sglang.http_client import ServerLost
from mppo.rollout.sglang.requests import Requests
from mppo.rollout.sglang.server_api import SGLangApi
from mppo.rollout.sglang.server_response import ServerResponse, parse_responses

VOCABULARY, LIMIT = 100, 5


def answer(logprobs: list[float | None], ids: list[int], **extra: Any) -> dict[str, Any]:
    entries = [(value, token, None) for value, token in zip(logprobs, ids, strict=True)]
    reason = {"type": "stop", "matched": 2}
    meta = {"finish_reason": reason, "output_token_logprobs": entries, "weight_version": "3"}
    return {"output_ids": ids, "meta_info": meta | extra}


def read(answers: Any) -> list[ServerResponse]:
    return parse_responses(json.dumps(answers).encode())


FLOATS = st.floats(-700.0, 0.0, width=32) | st.floats(-(2.0**-20), 0.0, width=32)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.tuples(FLOATS, st.integers(0, (1 << 31) - 1)), max_size=40), max_size=4)
)
def test_every_float32_and_id_is_read_exactly(rows: list[list[tuple[float, int]]]) -> None:
    values, ids = ([[pair[i] for pair in row] for row in rows] for i in (0, 1))
    found = read([answer(*each) for each in zip(values, ids, strict=True)])
    assert [each.tokens.tolist() for each in found] == ids
    for response, expected in zip(found, values, strict=True):
        assert (response.tokens.dtype, response.logprobs.dtype) == (torch.int32, torch.float32)
        assert torch.equal(response.logprobs, torch.tensor(expected))


def test_a_response_says_why_it_ended_and_which_experts_it_took() -> None:
    experts = base64.b64encode(bytes(range(8))).decode()
    reason = {"type": "abort", "message": "x"}
    (found,) = read(answer([-0.5], [7], finish_reason=reason, routed_experts=experts))
    assert (found.reason, found.weight_version) == ("abort", "3")
    assert found.routed_experts == bytes(range(8))
    assert found.with_final_reason({7}).reason == "stop"
    aborted = {"output_ids": [], "meta_info": {"finish_reason": reason}}
    (found,) = read(aborted)
    assert (len(found.tokens), len(found.logprobs), found.routed_experts) == (0, 0, None)


def test_a_log_probability_that_is_not_finite_is_a_nan() -> None:
    """SGLang writes null; the run then ends with the prompt's number and the weights' version."""
    first, second = read([answer([-0.5, None], [3, 4]), answer([-0.25], [5])])
    assert math.isnan(first.logprobs[1])
    assert first.fault(LIMIT, VOCABULARY, 3) is None
    assert second.logprobs.tolist() == [-0.25]


def _changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A response with a change."""
    response = answer([-0.5, -0.25], [3, 4])
    change(response)
    return json.dumps([response], separators=(",", ":")).encode()


def _set(ids: list[Any] | None = None, **meta: Any) -> bytes:
    """With other ids, or other values beside them."""
    return _changed(
        lambda response: (
            response.update({} if ids is None else {"output_ids": ids}),
            response["meta_info"].update(meta),
        )
    )


def _tokens(logprobs: list[Any], ids: list[Any]) -> bytes:
    return _set(ids=ids, output_token_logprobs=[[*each, None] for each in zip(logprobs, ids)])


FAULTY = {
    "a response too many": (
        json.dumps([answer([-0.5], [3])] * 2).encode(), "returned 2 responses to 1 prompts"
    ),
    "a response too few": (b"[]", "returned 0 responses to 1 prompts"),
    "text": (b"Success", "returned 0 responses"),
    "numbers": (b"[3, 4]", "not a response with tokens"),
    "a finish reason of null": (_set(finish_reason=None), "finish_reason is None"),
    "a finish reason of its own": (_set(finish_reason={"type": "sleepy"}), "finish_reason.*sleepy"),
    "too many tokens": (_tokens([-0.5] * 6, [3] * 6), "returned 6 tokens, 5 were asked for"),
    "a probability above 1": (
        _tokens([-0.5, 0.25], [3, 4]), r"a probability above 1 \(log-probability 0.25\)"
    ),
    "an id behind the vocabulary": (_tokens([-1] * 2, [3, 100]), "token 100, the model has 100"),
    "a negative id": (_tokens([-1] * 2, [3, -1]), "token ids from -1 to 3"),
    "an id of 64 bits": (_tokens([-1] * 2, [3, 1 << 63]), "token ids from 3 to 92233720368547758"),
    "an id of 70 bits": (_tokens([-1] * 2, [3, 1 << 70]), "not an integer"),
    "true as an id": (_tokens([-1] * 2, [1, True]), "not an integer"),
    "a fraction as an id": (_tokens([-1], [1.0]), "not an integer"),
    "a number of cached tokens in words": (_set(cached_tokens="many"), "cached_tokens is many"),
    "fewer than no cached tokens": (_set(cached_tokens=-1), "cached_tokens is -1"),
    "a text as log-probability": (_tokens(["-0.5"], [3]), "not a number"),
    "other ids than its log-probabilities": (_set(ids=[3, 5]), "output_ids differ"),
    "fewer ids than log-probabilities": (_set(ids=[3]), "1 tokens with 2 log-probabilities"),
    "ids without log-probabilities": (
        _set(output_token_logprobs=[]), "2 tokens with 0 log-probabilities"
    ),
    "entries of unequal lengths": (
        _set(output_token_logprobs=[[-0.5, 3, None], [-0.5, 4]]), "shorter"
    ),
    "numbers for entries": (_set(output_token_logprobs=[3, 4]), "not a response with tokens"),
    "experts that are not base64": (_set(routed_experts="a?"), "unusable"),
    "a comma without a number": (
        _changed(lambda response: None).replace(b":[3,4]", b":[,4]"), "expected a JSON value"
    ),
    "NaN": (_set(weight_version=math.nan), "expected a JSON value"),
    "half an answer": (_changed(lambda response: None)[:-9], "unusable"),
    "an old version": (_set(weight_version="2"), "has weights of version 2, not 3"),
}  # fmt: skip


def _generated(url: str, folder: Path) -> list[Episode]:
    """One response to one prompt, by a server with weights of version 3."""
    rollout = RolloutConfig(name="sglang", mode="disaggregated", urls=(url,))
    place = (0, 1, torch.device("cpu"), folder)
    fleet = Fleet(rollout, folder, SimpleNamespace(model_type="qwen2"), torch.float32, *place)
    fleet._apis[0] = fleet.client(url)
    request = GenerationRequest([Prompt(0, (5, 6), "t", "", "")], SamplingConfig(), LIMIT, seed=0)
    requests = Requests(fleet, lambda: 3, 0, 1)
    generation = SGLangGeneration(request, (), VOCABULARY, None, requests, rollout)
    return generation.collect()


def test_a_good_answer_is_taken(tmp_path) -> None:
    with hostile_server(says(_set())) as url:
        (response,) = _generated(url, tmp_path)
    assert response.here.ids.tolist() == [3, 4]
    assert response.here.logprobs.tolist() == [-0.5, -0.25]
    assert (response.finish_reason, response.parts) == ("stop", ((3, 2),))


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_answer_is_refused_with_the_server(name: str, tmp_path) -> None:
    body, message = FAULTY[name]
    with (
        hostile_server(says(body)) as url,
        pytest.raises(RuntimeError, match="1 of 1 requests were not served in 3") as caught,
    ):
        _generated(url, tmp_path)
    assert re.search(rf"{url}: .*{message}", str(caught.value)), caught.value


@pytest.mark.parametrize(
    "meta",
    [
        {"input_token_logprobs": [[None, 5], [-0.5, 6]]},
        {"input_token_logprobs": [[None, 5], ["x", 6], [-1.0, 7]]},
        {"input_token_logprobs": 3},
        {},
    ],
)
def test_faulty_scores_are_refused_with_the_server(meta: dict[str, Any]) -> None:
    with (
        hostile_server(says(json.dumps([{"meta_info": meta}]).encode())) as url,
        pytest.raises(ServerLost, match=rf"{url}: returned"),
    ):
        SGLangApi(url, None, 30.0).score([[5, 6, 7]])

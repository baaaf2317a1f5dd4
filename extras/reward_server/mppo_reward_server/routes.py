"""Answers of a reward server, by path, in the formats that ``reward.format`` names."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from mppo.batch.prompt import Prompt
from mppo.batch.score import ResponseScore
from mppo.rewards.remote.classifier import scored_tokens, text_tokens
from mppo.rewards.response import Response, RewardFunction
from mppo.rewards.result import ANSWER
from mppo.rewards.scores import read_scores
from mppo_reward_server.json_server import Route
from mppo_reward_server.sequence_classifier import SequenceClassifier

MPPO, OPENRLHF, SGLANG = "/score", "/get_reward", "/classify"


def function_routes(function: RewardFunction) -> dict[str, Route]:
    """Routes of a reward function: mppo's format and OpenRLHF's."""
    lock = threading.Lock()

    def score(responses: Sequence[Response]) -> list[ResponseScore]:
        with lock:
            return read_scores(function(responses), responses, on_error=0.0)

    def mppo(content: dict[str, Any]) -> Any:
        responses, ids = _responses(content)
        return {"scores": [_entry(each) for each in score(responses)], "ids": ids}

    def openrlhf(content: dict[str, Any]) -> Any:
        return _rewards(score(_query_responses(content)))

    return {MPPO: mppo, OPENRLHF: openrlhf}


def model_routes(model: SequenceClassifier) -> dict[str, Route]:
    """Routes of a reward model: mppo's format, OpenRLHF's and SGLang's."""
    tokenizer = model.tokenizer

    def mppo(content: dict[str, Any]) -> Any:
        responses, ids = _responses(content)
        templated = bool(tokenizer.chat_template)
        tokens = scored_tokens(tokenizer, responses, templated, "chat template") if ids else []
        return {"scores": list(map(_number, model.score(tokens))), "ids": ids}

    def openrlhf(content: dict[str, Any]) -> Any:
        scores = model.score(text_tokens(tokenizer, _texts(content, "query")))
        return {"rewards": scores, "scores": scores}

    def sglang(content: dict[str, Any]) -> Any:
        if "input_ids" in content:
            tokens = _tokens(content["input_ids"])
        else:
            tokens = text_tokens(tokenizer, _texts(content, "text"))
        names = content.get("rid") or [str(index) for index in range(len(tokens))]
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list) or len(names) != len(tokens):
            raise ValueError(f"rid is not a list of {len(tokens)} names")
        return [
            {"embedding": [score], "meta_info": {"id": name, "prompt_tokens": len(ids)}}
            for name, ids, score in zip(names, tokens, model.score(tokens))
        ]

    return {MPPO: mppo, OPENRLHF: openrlhf, SGLANG: sglang}


def _responses(content: dict[str, Any]) -> tuple[list[Response], list[str]]:
    """The responses of a request in mppo's format, and their ids."""
    items = content.get("items")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError("the request has no list 'items' of objects")
    ids = [str(item.get("id", index)) for index, item in enumerate(items)]
    return [_response(item) for item in items], ids


def _response(item: Mapping[str, Any]) -> Response:
    texts = {name: item.get(name, "") for name in ("prompt", "response", "ground_truth")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{name} is not a text")
    messages, extra = item.get("messages", []), item.get("extra", {})
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ValueError("messages is not a list of objects with role and content")
    if not isinstance(extra, dict):
        raise ValueError("extra is not an object")
    uid, source = item.get("uid", 0), str(item.get("data_source", ""))
    prompt = Prompt(
        uid if isinstance(uid, int) else 0,
        (),  # pyright: ignore[reportArgumentType]  # converted
        source,
        texts["ground_truth"],
        texts["prompt"],
        extra,
        messages=tuple(messages),
    )
    return Response(prompt, texts["response"])


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and {"role", "content"} <= message.keys()


def _query_responses(content: dict[str, Any]) -> list[Response]:
    """The responses of a request in OpenRLHF's format: what follows the prompt in each query."""
    queries = _texts(content, "query")
    nothing = [""] * len(queries)
    prompts = _texts(content, "prompts") if content.get("prompts") else nothing
    labels = content.get("labels") or nothing
    if not isinstance(labels, list) or not len(queries) == len(prompts) == len(labels):
        raise ValueError("query, prompts and labels have different lengths")
    return [
        _response(
            {"uid": index, "prompt": prompt, "response": query.removeprefix(prompt),
             "ground_truth": "" if label is None else str(label)}
        )
        for index, (query, prompt, label) in enumerate(zip(queries, prompts, labels))
    ]  # fmt: skip


def _texts(content: dict[str, Any], name: str) -> list[str]:
    found = content.get(name)
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"the request has no list {name!r} of texts")
    return found


def _tokens(given: Any) -> list[list[int]]:
    if isinstance(given, list) and given and not isinstance(given[0], list):
        given = [given]
    if not isinstance(given, list) or not all(isinstance(ids, list) for ids in given):
        raise ValueError("input_ids is not a list of lists of integers")
    if not all(type(token) is int for ids in given for token in ids):
        raise ValueError("input_ids has a token that is not an integer")
    return given


def _entry(score: ResponseScore) -> Any:
    """A score in mppo's format."""
    if score.error is not None:
        return {"error": score.error}
    answer = {} if score.answer is None else {ANSWER: score.answer}
    more = {**answer, **score.numbers}
    return {**more, "score": score.score} if more else score.score


def _number(score: float) -> Any:
    if math.isfinite(score):
        return score
    return {"error": f"the reward model's output is {score}"}


def _rewards(scores: Sequence[ResponseScore]) -> Any:
    """Scores in OpenRLHF's format; null for a response without one."""
    rewards = [None if each.error is not None else each.score for each in scores]
    names = sorted(set().union(*(each.numbers for each in scores)))
    logs = {name: [each.numbers.get(name) for each in scores] for name in names}
    return {"rewards": rewards, "scores": rewards, "extra_logs": logs}

"""The interface of a wire format; the formats for batches: mppo's own, and OpenRLHF's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mppo.rewards.response import Response
from mppo.rewards.scores import FailedScore
from mppo.safety.foreign_text import quoted
from mppo.safety.input_error import InputError


class WireFormat(Protocol):
    """The requests and answers of a kind of reward server.

    An item is what a server gives one result for: a response, or one test of a program.
    """

    def items(self, responses: Sequence[Response]) -> list[list[Any]]:
        """The items of each response. A ``FailedScore`` in place of an item is its result."""
        ...

    def body(self, items: Sequence[Any], ids: Sequence[str]) -> Any:
        """The JSON content of a request; ``ids`` are new for each item, unique over all
        requests."""
        ...

    def read(self, answer: Any, items: Sequence[Any], ids: Sequence[str]) -> list[Any]:
        """The result of each item of a request.

        Values that ``mppo.rewards.result`` reads, or a ``FailedScore`` that no retry can cure. A
        value that is not a score is asked for again.

        Raises:
            InputError: the answer is not one to these items; the request is sent again.
        """
        ...

    def combine(self, results: Sequence[Any]) -> Any:
        """The result of a response from those of its items, by default its only one; none of them
        is a ``FailedScore``."""
        (result,) = results
        return result


def list_of(answer: Any, name: str, count: int) -> list[Any]:
    """Take the list under a key out of an answer; InputError if it is missing or not of this
    length."""
    found = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(found, list) or len(found) != count:
        sent = f"a list of {len(found)}" if isinstance(found, list) else "no such list"
        raise InputError(f"it must answer with a list {name!r} of length {count}; it sent {sent}")
    return found


class MppoFormat(WireFormat):
    """mppo's own format.

    Request: ``{"items": [{"id", "uid", "prompt", "messages", "response", "ground_truth",
    "data_source", "extra"}, ...]}``. Answer: ``{"scores": [...], "ids": [...]}``, in any order; an
    answer to one item may leave the ids out. A score is a number, an object with ``score`` and
    further numbers, or ``{"error": text}``.
    """

    def items(self, responses: Sequence[Response]) -> list[list[Any]]:
        return [
            [
                {
                    "uid": each.prompt.uid,
                    "prompt": each.prompt.text,
                    "messages": [dict(message) for message in each.prompt.messages],
                    "response": each.text,
                    "ground_truth": each.prompt.ground_truth,
                    "data_source": each.prompt.data_source,
                    "extra": each.prompt.extra,
                }
            ]
            for each in responses
        ]

    def body(self, items: Sequence[Any], ids: Sequence[str]) -> Any:
        return {"items": [{"id": name, **item} for name, item in zip(ids, items)]}

    def read(self, answer: Any, items: Sequence[Any], ids: Sequence[str]) -> list[Any]:
        scores = list_of(answer, "scores", len(ids))
        if len(ids) > 1 or "ids" in answer:
            scores = _in_order(scores, answer.get("ids"), ids)
        return [_failed(score) for score in scores]


class OpenRLHFFormat(WireFormat):
    """OpenRLHF's ``remote_rm_url``.

    Request: ``{"query": [prompt and response], "prompts": [...], "labels": [...]}``. Answer:
    ``{"rewards": [...]}`` and, if the server has further numbers, ``"extra_logs": {name: [...]}``.
    """

    def items(self, responses: Sequence[Response]) -> list[list[Any]]:
        return [[(each.prompt.text, each.text, each.prompt.ground_truth)] for each in responses]

    def body(self, items: Sequence[Any], ids: Sequence[str]) -> Any:
        """The texts; the format has no place for ids."""
        return {
            "query": [prompt + response for prompt, response, _ in items],
            "prompts": [prompt for prompt, _, _ in items],
            "labels": [label for _, _, label in items],
        }

    def read(self, answer: Any, items: Sequence[Any], ids: Sequence[str]) -> list[Any]:
        rewards = list_of(answer, "rewards", len(ids))
        logs = answer.get("extra_logs")
        found = {
            name: values
            for name, values in (logs.items() if isinstance(logs, dict) else ())
            if isinstance(values, list) and len(values) == len(ids)
        }
        numbers = [{name: values[i] for name, values in found.items()} for i in range(len(ids))]
        return [{**more, "score": reward} for more, reward in zip(numbers, rewards)]


def _in_order(scores: Sequence[Any], given: Any, ids: Sequence[str]) -> list[Any]:
    if not isinstance(given, list):
        raise InputError(
            "it must repeat the request's ids in a list 'ids', in the order of its scores (or set "
            "reward.kwargs.batch_size to 1); it sent none"
        )
    if sorted(map(str, given)) != sorted(ids):
        raise InputError("the list 'ids' does not have the ids of the request, once each")
    by_id = dict(zip(map(str, given), scores))
    return [by_id[name] for name in ids]


def _failed(score: Any) -> Any:
    if isinstance(score, dict) and "score" not in score and "error" in score:
        return FailedScore(f"the server reports: {quoted(str(score['error']))}")
    return score

"""The interface of a wire format, and what formats share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mppo.rewards.response import Response
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
        """The result of a response from those of its items; none of them is a ``FailedScore``."""
        ...


class OneItemPerResponse:
    """The part of a format whose items are responses."""

    def combine(self, results: Sequence[Any]) -> Any:
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

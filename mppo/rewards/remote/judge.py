"""A generative model that judges responses, behind an OpenAI-style chat endpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import regex

from mppo.recipe.sections.remote import JudgeOptions
from mppo.rewards.remote.wire import WireFormat
from mppo.rewards.response import Response
from mppo.rewards.scores import FailedScore
from mppo.safety.foreign_text import quoted
from mppo.safety.input_error import InputError

SEARCHED = 1 << 16
"""Characters at the end of an answer in which the score is looked for."""
SEARCH_S = 1.0
"""Time limit of the search: a pattern may need exponential time for some texts."""
_PLACES = re.compile(r"\{(prompt|response|ground_truth)\}")


class JudgeFormat(WireFormat):
    """``/v1/chat/completions``: one message per request, whose answer contains the score."""

    def __init__(self, options: JudgeOptions) -> None:
        self._options = options
        self._pattern = regex.compile(options.pattern)

    def items(self, responses: Sequence[Response]) -> list[list[Any]]:
        return [[self._fill(response)] for response in responses]

    def _fill(self, response: Response) -> str:
        prompt = response.prompt
        values = {
            "prompt": prompt.text, "response": response.text, "ground_truth": prompt.ground_truth
        }  # fmt: skip
        # in one pass: a response that contains {ground_truth} stays as it is
        return _PLACES.sub(lambda place: values[place[1]], self._options.template)

    def body(self, items: Sequence[Any], ids: Sequence[str]) -> Any:
        (text,) = items
        return {
            "model": self._options.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": self._options.temperature,
            "max_tokens": self._options.max_tokens,
        }

    def read(self, answer: Any, items: Sequence[Any], ids: Sequence[str]) -> list[Any]:
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise InputError("it must answer with a text in choices[0].message.content")
        return [self.find_score(text)]

    def find_score(self, text: str) -> float | FailedScore:
        """The number in the last match of the pattern."""
        found = None
        try:
            # concurrent: other threads of the process, such as the heartbeat, run meanwhile
            searched = self._pattern.finditer(text[-SEARCHED:], concurrent=True, timeout=SEARCH_S)
            for match in searched:
                found = match[1]
        except TimeoutError:
            return FailedScore(
                f"reward.kwargs.pattern needs more than {SEARCH_S:g} s for the judge's answer"
            )
        try:
            score = float(found or "")
        except ValueError:
            what = "no score" if found is None else f"the score {quoted(found)!r}, not a number"
            return FailedScore(f"the judge's answer has {what}: {quoted(text[-SEARCHED:])!r}")
        low, high = self._options.range or (score, score)
        if not low <= score <= high:
            return FailedScore(f"the judge's score {score:g} is outside of {low:g} to {high:g}")
        return score

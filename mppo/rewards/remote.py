"""Scores from a reward server: batched JSON over HTTP.

Request: ``{"items": [{"uid", "prompt", "response", "ground_truth", "data_source", "extra"}, ...]}``
Answer: ``{"scores": [number, ...]}``, in the same order.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit

from mppo.config.errors import ConfigError, ConfigIssue
from mppo.rewards.response import Response
from mppo.safety.bounded_http import Answer, fetch, parse_answer, url_problem
from mppo.safety.foreign_text import quoted
from mppo.safety.redact import query_secrets, remember

MAX_ANSWER_BYTES = 16 << 20
"""Limit of an answer's size: the scores of a batch take kilobytes, but servers may send other keys
too."""


class _Retryable(Exception):
    """A failure that a retry may cure: no connection, a time-out, HTTP 429 or 5xx."""


@dataclass(frozen=True)
class RemoteReward:
    """Sends responses to a reward server, batch by batch.

    Args:
        url: address of the POST requests. A loopback address is reached directly, without a proxy.
        timeout_s: time limit for one request in seconds, from connecting to the last byte.
        batch_size: responses per request.
        retries: further attempts after a failure that a retry may cure.
        backoff_s: seconds before the first retry; doubled each time.
        api_key_env: environment variable whose value is sent as ``Authorization: Bearer``. The
            recipe never holds the key itself.
    """

    url: str
    timeout_s: float = 60.0
    batch_size: int = 256
    retries: int = 3
    backoff_s: float = 0.5
    api_key_env: str | None = None

    def __post_init__(self) -> None:
        problem = url_problem(self.url)
        if problem:
            fix = "write http://host:port/path; a key goes into reward.kwargs.api_key_env"
            raise ConfigError([ConfigIssue("reward.url", self.url, problem, fix)])
        limits = {"batch_size": (int, 1), "retries": (int, 0), "backoff_s": ((int, float), 0)}
        for name, (kind, least) in limits.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool) or not value >= least:
                why = f"is not a number of at least {least}"
                fix = f"give a number of at least {least}"
                raise ConfigError([ConfigIssue(f"reward.kwargs.{name}", value, why, fix)])
        if self.api_key_env is not None:
            self._check_key(self.api_key_env)

    def _check_key(self, variable: str) -> None:
        key = os.environ.get(variable, "") if isinstance(variable, str) else ""
        why, fix = None, ""
        if not key:
            why, fix = "no such environment variable is set", "set it to the server's key"
        elif not key.isascii() or not key.isprintable():
            why = "its value holds line breaks or other characters that no HTTP header can hold"
            fix = "set it to the key alone"
        if why:
            raise ConfigError([ConfigIssue("reward.kwargs.api_key_env", variable, why, fix)])
        remember(key)

    @property
    def shown_url(self) -> str:
        """The URL as messages show it: without credentials and query."""
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        return f"{parts.scheme}://{host}{parts.path}"

    def __call__(self, responses: Sequence[Response]) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(responses), self.batch_size):
            scores += self._score(responses[start : start + self.batch_size])
        return scores

    def _score(self, responses: Sequence[Response]) -> list[float]:
        body = json.dumps(
            {"items": [_item(response) for response in responses]}, default=str
        ).encode()
        answer = self._post_with_retries(body)
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list) or len(scores) != len(responses):
            found = f"a list of {len(scores)}" if isinstance(scores, list) else "no such list"
            raise ValueError(
                f"the reward server {self.shown_url} must answer with a list 'scores' of "
                f"{len(responses)} numbers, for prompts {responses[0].prompt.uid} to "
                f"{responses[-1].prompt.uid}; it sent {found}"
            )
        return scores

    def _post_with_retries(self, body: bytes) -> Any:
        for attempt in range(self.retries + 1):
            try:
                return self._post(body)
            except _Retryable as error:
                if attempt == self.retries:
                    raise ValueError(
                        f"the reward server {self.shown_url} failed {attempt + 1} times, "
                        f"last: {error}"
                    ) from None
                time.sleep(self.backoff_s * 2**attempt)
        raise AssertionError("the loop ends by return or raise")

    def _post(self, body: bytes) -> Any:
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        if self.api_key_env:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        try:
            answer = fetch(request, self.timeout_s, MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _Retryable(self._quoted(self._reason(error))) from None
        self._check_status(answer)
        try:
            return parse_answer(answer.body)
        except ValueError as error:
            raise ValueError(
                f"the reward server {self.shown_url} sent no JSON ({self._quoted(str(error))}): "
                f"{self._quoted(answer.body)!r}"
            ) from None

    def _check_status(self, answer: Answer) -> None:
        """Raise unless the status is 200."""
        if answer.status == 200:
            return
        message = f"HTTP {answer.status} {self._quoted(answer.reason)}"
        if 300 <= answer.status < 400:
            raise ValueError(
                f"the reward server {self.shown_url} answered {message}, a redirect to "
                f"{self._quoted(answer.location) or 'no address'}; redirects are not followed, "
                "because the responses and the key would go to another address: set reward.url to "
                "the final address"
            )
        message += f": {self._quoted(answer.body)}"
        if answer.status == 429 or answer.status >= 500:
            raise _Retryable(message)
        raise ValueError(f"the reward server {self.shown_url} answered {message}")

    def _reason(self, error: Exception) -> str:
        cause = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, TimeoutError):
            return f"timed out: no complete answer within {self.timeout_s:g} s (reward.timeout_s)"
        return f"{type(cause).__name__}: {cause}" if isinstance(cause, Exception) else str(cause)

    @property
    def _key(self) -> str:
        return os.environ[self.api_key_env or ""]

    def _quoted(self, text: bytes | str) -> str:
        """Quote the server's text without control characters, the key and the URL's query."""
        query = urlsplit(self.url).query
        own = query_secrets(self.url) | ({query} if query else set())
        return quoted(text, own | ({self._key} if self.api_key_env else set()))


def _item(response: Response) -> dict[str, Any]:
    prompt = response.prompt
    return {
        "uid": prompt.uid,
        "prompt": prompt.text,
        "response": response.text,
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
        "extra": prompt.extra,
    }

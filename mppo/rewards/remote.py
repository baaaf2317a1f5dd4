"""Scores by a server: batched JSON over HTTP.

Request: ``{"items": [{"uid", "prompt", "response", "ground_truth", "data_source", "extra"}, ...]}``
Answer: ``{"scores": [number, ...]}``, in the same order.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mppo.config.errors import ConfigError, Fault
from mppo.rewards.response import Response

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class _Retryable(Exception):
    """A failure that may pass: no connection, time-out, 429 or 5xx."""


@dataclass(frozen=True)
class RemoteJudge:
    """Sends responses to a reward server, batch by batch.

    Args:
        url: where to POST. A loopback address is reached directly, whatever proxy is set.
        timeout_s: seconds to wait for one answer.
        batch_size: responses per request.
        retries: further attempts after a failure that may pass.
        backoff_s: seconds before the first retry; doubled each time.
        api_key_env: environment variable whose value is sent as ``Authorization: Bearer``. The
            key itself never stands in a recipe.
    """

    url: str
    timeout_s: float = 60.0
    batch_size: int = 256
    retries: int = 3
    backoff_s: float = 0.5
    api_key_env: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError([Fault("reward.url", self.url, "no URL", "http://host:port/path")])
        if parts.username or parts.password:
            fault = Fault(
                "reward.url",
                self.shown_url,
                "a recipe must not hold a password",
                "put the key into an environment variable and name it in reward.kwargs.api_key_env",
            )
            raise ConfigError([fault])
        if self.api_key_env and self.api_key_env not in os.environ:
            why = "no such environment variable is set"
            fault = Fault("reward.kwargs.api_key_env", self.api_key_env, why, "set it")
            raise ConfigError([fault])

    @property
    def shown_url(self) -> str:
        """The URL without credentials and query, for messages."""
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
            found = f"{len(scores)} of them" if isinstance(scores, list) else "no such list"
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
                    ) from error
                time.sleep(self.backoff_s * 2**attempt)
        raise AssertionError("the loop ends by return or raise")

    def _post(self, body: bytes) -> Any:
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        if self.api_key_env:
            request.add_unredirected_header(
                "Authorization", f"Bearer {os.environ[self.api_key_env]}"
            )
        direct = urlsplit(self.url).hostname in LOOPBACK
        handlers = [urllib.request.ProxyHandler({})] if direct else []
        try:
            opener = urllib.request.build_opener(*handlers)
            with opener.open(request, timeout=self.timeout_s) as reply:
                content = reply.read()
        except urllib.error.HTTPError as error:
            text = error.read(200).decode(errors="replace")
            message = f"HTTP {error.code} {error.reason}: {text}"
            if error.code == 429 or error.code >= 500:
                raise _Retryable(message) from error
            raise ValueError(f"the reward server {self.shown_url} answered {message}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _Retryable(str(error)) from error
        try:
            return json.loads(content)
        except ValueError as error:
            raise ValueError(
                f"the reward server {self.shown_url} sent no JSON: {content[:80]!r}"
            ) from error


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

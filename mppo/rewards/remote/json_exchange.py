"""Exchange of JSON with a reward server over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit

from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.safety.bounded_http import Answer, fetch, parse_answer, url_problem
from mppo.safety.foreign_text import quoted
from mppo.safety.redact import query_secrets, remember

MAX_ANSWER_BYTES = 16 << 20
"""Limit of an answer's size: the scores of a batch take kilobytes, but servers may send other keys
too."""
_OF_ITEMS = frozenset({400, 413, 422})
"""Statuses with which a server refuses the content of a request, and not every request."""
_TEMPORARY = frozenset({408, 425, 429})


class ServerFailure(Exception):
    """A request without a usable answer; its message holds no secrets. ``retry``: the same request
    may succeed later; ``of_items``: the server refuses its content, and others may succeed."""

    def __init__(self, message: str, retry: bool = True, of_items: bool = False) -> None:
        super().__init__(message)
        self.retry, self.of_items = retry, of_items


@dataclass(frozen=True)
class RewardServer:
    """The address of a reward server, and the environment variable ``api_key_env`` whose value is
    sent as ``Authorization: Bearer``: a recipe never holds the key itself. A loopback address is
    reached directly, without a proxy. A request may take ``timeout_s`` seconds, from connecting to
    the last byte. ``url_key``, ``env_key`` and ``timeout_key`` name the settings in messages; no
    ``timeout_key``: the limit is no setting."""

    url: str
    timeout_s: float = 60.0
    api_key_env: str | None = None
    url_key: str = "reward.url"
    env_key: str = "reward.kwargs.api_key_env"
    timeout_key: str | None = "reward.timeout_s"

    def __post_init__(self) -> None:
        problem = url_problem(self.url)
        if problem:
            fix = f"write http://host:port/path; a key goes into {self.env_key}"
            raise ConfigError([ConfigIssue(self.url_key, self.url, problem, fix)])
        if self.api_key_env is not None:
            self._check_key(self.api_key_env)

    def _check_key(self, variable: str) -> None:
        key, why, fix = os.environ.get(variable, ""), None, ""
        if not key:
            why, fix = "no such environment variable is set", "set it to the server's key"
        elif not key.isascii() or not key.isprintable():
            why = "its value holds line breaks or other characters that no HTTP header can hold"
            fix = "set it to the key alone"
        if why:
            raise ConfigError([ConfigIssue(self.env_key, variable, why, fix)])
        remember(key)

    @property
    def shown_url(self) -> str:
        """The URL as messages show it: without credentials and query."""
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        return f"{parts.scheme}://{host}{parts.path}"

    def post(self, content: Any) -> Any:
        """Send JSON and return the parsed answer; ServerFailure if there is no usable one."""
        body = json.dumps(content, default=str).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        if self.api_key_env:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        try:
            answer = fetch(request, self.timeout_s, MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerFailure(self.quote(self._reason(error))) from None
        self._check_status(answer)
        try:
            return parse_answer(answer.body)
        except ValueError as error:
            shown = f"({self.quote(str(error))}): {self.quote(answer.body)!r}"
            raise ServerFailure(f"the server sent no JSON {shown}") from None

    def _check_status(self, answer: Answer) -> None:
        status = answer.status
        if status == 200:
            return
        message = f"HTTP {status} {self.quote(answer.reason)}"
        if 300 <= status < 400:
            raise ServerFailure(
                f"the server answered {message}, a redirect to "
                f"{self.quote(answer.location) or 'no address'}; redirects are not followed, "
                "because the responses and the key would go to another address: set "
                f"{self.url_key} to the final address",
                retry=False,
            )
        retry = status in _TEMPORARY or status >= 500
        raise ServerFailure(f"{message}: {self.quote(answer.body)}", retry, status in _OF_ITEMS)

    def _reason(self, error: Exception) -> str:
        cause = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, TimeoutError):
            setting = f" ({self.timeout_key})" if self.timeout_key else ""
            return f"timed out: no complete answer within {self.timeout_s:g} s{setting}"
        return f"{type(cause).__name__}: {cause}" if isinstance(cause, Exception) else str(cause)

    @property
    def _key(self) -> str:
        return os.environ[self.api_key_env or ""]

    def quote(self, text: bytes | str) -> str:
        """Quote the server's text without control characters, the key and the URL's query."""
        query = urlsplit(self.url).query
        own = query_secrets(self.url) | ({query} if query else set())
        return quoted(text, own | ({self._key} if self.api_key_env else set()))

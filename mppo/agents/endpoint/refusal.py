"""Answers to requests that cannot be served, in the JSON shapes of OpenAI and Anthropic."""

from __future__ import annotations

from typing import Any

from mppo.safety.foreign_text import quoted

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
INVALID_KEY, TOO_LONG = "invalid_api_key", "context_length_exceeded"


class Refusal(Exception):
    """A request is not served. ``code``: OpenAI's word for it; ``param``: the part at issue;
    ``retry``: whether a client should try again, None: as it does for the status."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry = status, code, param, retry

    def content(self) -> dict[str, Any]:
        """The answer: ``error`` has OpenAI's keys, ``type`` at the top is Anthropic's."""
        error = {
            "message": str(self),
            "type": _TYPES.get(self.status, "api_error"),
            "param": self.param,
            "code": self.code,
        }
        return {"type": "error", "error": error}

    def headers(self) -> dict[str, str]:
        """The header that tells the clients of OpenAI and Anthropic whether to try again."""
        return {} if self.retry is None else {"x-should-retry": str(self.retry).lower()}


def invalid(message: str, param: str | None = None) -> Refusal:
    """The refusal of a bad request; text of the client in the message is shortened."""
    return Refusal(400, quoted(message), param=param)

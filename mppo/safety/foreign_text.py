"""Text from another host, a model or data: quoted in messages, and cleaned before it is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

from mppo.safety.redact import HIDDEN, redact_text

SHOWN = 200
_SEARCHED = 4096
_SHORTEST_PART = 4
_LINE_BREAKS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""Escapes of the characters that JSON leaves as they are and some readers take for line breaks."""


def quoted(text: bytes | str, secrets: Collection[str] = ()) -> str:
    """Return a text on one line, at most ``SHOWN`` long, without control characters and secrets:
    ``secrets`` and those that ``redact_text`` finds."""
    text = text[:_SEARCHED]
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    text = "".join(_clean(char) for char in text)
    for secret in sorted(secrets, key=len, reverse=True):
        text = _without_cut_secret(text.replace(secret, HIDDEN), secret)
    text = redact_text(text)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def visible(text: str) -> str:
    """The text on one line, with escapes for line breaks and unprintable characters."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def valid_text(text: str) -> str:
    """The text with ``?`` for each half of a surrogate pair. JSON of a model may hold one, but no
    encoding, file, template or tokenizer accepts it."""
    return text.encode(errors="replace").decode()


def json_line(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """A value as JSON that is one line for every reader, without halves of surrogate pairs.
    ``default`` converts what JSON does not have; without it a TypeError or ValueError is raised."""
    text = json.dumps(value, ensure_ascii=False, default=default)
    return valid_text(text.translate(_LINE_BREAKS))


def _clean(char: str) -> str:
    if char.isprintable():
        return char
    return " " if char.isspace() else ""


def _without_cut_secret(text: str, secret: str) -> str:
    """Remove the first letters of a secret at the end of the text, where the text was cut."""
    for length in range(len(secret) - 1, _SHORTEST_PART - 1, -1):
        if text.endswith(secret[:length]):
            return text[:-length]
    return text

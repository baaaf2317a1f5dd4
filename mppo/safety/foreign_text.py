"""What another host has sent, made fit for a message."""

from __future__ import annotations

from collections.abc import Collection

from mppo.safety.redact import HIDDEN, redact_text

SHOWN = 200
_SEARCHED = 4096
_SHORTEST_PART = 4


def quoted(text: bytes | str, secrets: Collection[str] = ()) -> str:
    """A text on one line, cut, without control characters and secrets.

    Args:
        text: any.
        secrets: what must not be shown, besides what ``redact_text`` finds.
    """
    text = text[:_SEARCHED]
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    text = "".join(_clean(char) for char in text)
    for secret in sorted(secrets, key=len, reverse=True):
        text = _without_its_begin(text.replace(secret, HIDDEN), secret)
    text = redact_text(text)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _clean(char: str) -> str:
    if char.isprintable():
        return char
    return " " if char.isspace() else ""


def _without_its_begin(text: str, secret: str) -> str:
    """The text without a secret's first letters at its end, where the search has cut it off."""
    for length in range(len(secret) - 1, _SHORTEST_PART - 1, -1):
        if text.endswith(secret[:length]):
            return text[:-length]
    return text

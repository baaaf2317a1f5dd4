"""Quoting of text from another host, or of a model, in a message."""

from __future__ import annotations

from collections.abc import Collection

from mppo.safety.redact import HIDDEN, redact_text

SHOWN = 200
_SEARCHED = 4096
_SHORTEST_PART = 4


def quoted(text: bytes | str, secrets: Collection[str] = ()) -> str:
    """Return a text on one line, at most ``SHOWN`` long, without control characters and secrets.

    Args:
        text: any text.
        secrets: values to hide, besides those that ``redact_text`` finds.
    """
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

"""Keeps keys, tokens and passwords out of what a run writes down."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
MIN_SECRET_LENGTH = 8
"""Shorter environment values are not looked for: they would be found in ordinary words."""

SECRET_NAME = re.compile(
    r"(^|[_\-.])(api[_-]?key|(access|private|secret|auth|signing)[_-]?key|secret|pass(word|wd|phrase)?"
    r"|token|bearer|credentials?|authorization|cookie)$",
    re.IGNORECASE,
)
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_NAMED_VALUE = re.compile(
    r"(?i)([\w\-]*(?:api[_-]?key|access[_-]?key|secret|password|passwd|token|credential)s?)"
    r"(=|:\s|\s)(\S+?)(?=[&;,\s]|$)"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}")


def redact(value: Any) -> Any:
    """A copy with every secret replaced by ``***``.

    A secret is: a text under a name such as ``api_key``, ``password`` or ``hub_token``; the
    user and password of a URL; ``name=value`` inside a text with such a name; and the value of any
    environment variable with such a name, wherever it appears.

    Args:
        value: nested mappings, sequences and plain values, as a resolved recipe holds.
    """
    if isinstance(value, Mapping):
        return {key: _redact_entry(str(key), entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return _redact_arguments(value)
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """A text with every secret in it replaced by ``***``."""
    for secret in _environment_secrets():
        text = text.replace(secret, HIDDEN)
    text = _URL_CREDENTIALS.sub(HIDDEN, text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    return _NAMED_VALUE.sub(_hide_named, text)


def _redact_entry(key: str, entry: Any) -> Any:
    if SECRET_NAME.search(key) and isinstance(entry, (str, bytes)) and entry:
        return HIDDEN
    return redact(entry)


def _redact_arguments(values: list[Any] | tuple[Any, ...]) -> list[Any]:
    """Items of a list; what follows a flag such as ``--api-key`` is hidden whole."""
    hidden: list[Any] = []
    previous: Any = None
    for each in values:
        flag = isinstance(previous, str) and previous.startswith("-")
        is_secret = flag and SECRET_NAME.search(previous) and isinstance(each, str)
        hidden.append(HIDDEN if is_secret else redact(each))
        previous = each
    return hidden


def _hide_named(match: re.Match[str]) -> str:
    name, between, value = match.groups()
    if between.isspace() and not name.startswith("-"):
        return match.group(0)  # an ordinary sentence: "the token limit"
    return f"{name}{between}{value if value == HIDDEN else HIDDEN}"


def _environment_secrets() -> list[str]:
    found = {
        value
        for name, value in os.environ.items()
        if SECRET_NAME.search(name) and len(value) >= MIN_SECRET_LENGTH
    }
    return sorted(found, key=len, reverse=True)

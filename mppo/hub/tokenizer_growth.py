"""How much longer than its text a tokenizer's stages may make it, from ``tokenizer.json``.

A stage that replaces a letter by a thousand others, after another of its kind, makes a gigabyte of
a short prompt. Regular expressions count as matching one character or more, and tables of
``Precompiled`` and Unicode's normal forms, whose growth has a limit of its own, as not growing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mppo.safety.input_error import InputError

MAX_GROWTH = 64
"""Most characters that all normalisers together may make of one."""
MAX_ADDED = 1024
"""Most tokens that a post-processor may add to a text, and characters that a normaliser may put in
front of it."""


def check_growth(file: Path, content: dict[str, Any]) -> None:
    """Check the normalisers and the post-processor in the content of a tokenizer's
    ``tokenizer.json``; InputError if they may exceed a limit."""
    growth = 1.0
    for stage in _stages(content.get("normalizer"), "normalizers"):
        given, added = stage.get("content"), stage.get("prepend")
        if isinstance(given, str):
            pattern = stage.get("pattern")
            text = pattern.get("String") if isinstance(pattern, dict) else None
            matched = max(1, len(text)) if isinstance(text, str) else 1
            growth *= max(1.0, len(given) / matched)
        if isinstance(added, str) and len(added) > MAX_ADDED:
            raise InputError(f"{file}: a normalizer prepends {len(added)} characters, {_most()}")
    if growth > MAX_GROWTH:
        raise InputError(
            f"{file}: its normalizers may make {growth:.3g} characters of one, more than "
            f"{MAX_GROWTH}"
        )
    for stage in _stages(content.get("post_processor"), "processors"):
        lists = [stage.get("single"), stage.get("pair")]
        special = stage.get("special_tokens")
        for each in special.values() if isinstance(special, dict) else ():
            lists.append(each.get("ids") if isinstance(each, dict) else None)
        longest = max((len(each) for each in lists if isinstance(each, list)), default=0)
        if longest > MAX_ADDED:
            raise InputError(f"{file}: its post_processor adds {longest} tokens, {_most()}")


def _most() -> str:
    return f"more than {MAX_ADDED}"


def _stages(stage: Any, inner: str) -> Iterator[dict[str, Any]]:
    if isinstance(stage, dict):
        yield stage
        for each in stage.get(inner) or ():
            yield from _stages(each, inner)

"""Tokens of texts, within limits of time and length.

A tokenizer comes from elsewhere, and may hold regular expressions whose time grows exponentially
with the length of a text. A slow tokenizer, written in Python, cannot be interrupted. A stage that
replaces a letter by a thousand others, after another of its kind, makes a gigabyte of a short
prompt; ``tokenizer.json`` tells. There, regular expressions count as matching one character or
more, and tables of ``Precompiled`` and Unicode's normal forms, whose growth has a limit of its own,
as not growing.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mppo.recipe.errors import ConfigError, config_error
from mppo.safety.input_error import InputError

if TYPE_CHECKING:  # the check of a recipe takes a second without
    from transformers import PreTrainedTokenizerBase

MAX_GROWTH = 64
"""Most characters that all normalisers together may make of one."""
MAX_ADDED = 1024
"""Most tokens that a post-processor may add to a text, and characters that a normaliser may put in
front of it."""
LIMIT_S, CHARACTERS_PER_S = 60.0, 50_000
"""Constant part of the time limit, and the least speed; fast tokenizers read millions a second."""


def tokens_of(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    special: bool = True,
    key: str = "model.path",
) -> list[list[int]]:
    """The token ids of each text, with the tokenizer's special tokens if ``special``; the recipe
    names it under ``key``. ConfigError if it takes longer than the limit, or its own code breaks
    off."""
    answers: queue.SimpleQueue[list[list[int]] | BaseException] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(tokenizer(list(texts), add_special_tokens=special)["input_ids"])  # pyright: ignore[reportArgumentType]
        except BaseException as error:  # whatever it is, the caller raises it
            answers.put(error)

    characters = sum(map(len, texts))
    limit_s = LIMIT_S + characters / CHARACTERS_PER_S
    # a fast tokenizer's thread holds no lock of Python's, and does not outlive the process
    threading.Thread(target=work, daemon=True, name="tokenizer").start()
    try:
        found = answers.get(timeout=limit_s)
    except queue.Empty:
        why = f"its tokenizer takes longer than {limit_s:.0f} s for {characters:,} characters"
        raise _failure(tokenizer, key, why) from None
    if isinstance(found, Exception):
        raise found
    if isinstance(found, BaseException):  # its Rust code panics, as at a limit of its expressions
        raise _failure(tokenizer, key, f"its tokenizer fails: {found}")
    return found


def _failure(tokenizer: PreTrainedTokenizerBase, key: str, why: str) -> ConfigError:
    fix = "take the tokenizer's files from their publisher again"
    return config_error(key, tokenizer.name_or_path, why, fix)


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

"""Tokens of texts, within a time limit.

A tokenizer comes from elsewhere, and may hold regular expressions whose time grows exponentially
with the length of a text. A slow tokenizer, written in Python, cannot be interrupted.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from mppo.config.errors import ConfigError, ConfigIssue

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
    return ConfigError([ConfigIssue(key, tokenizer.name_or_path, why, fix)])

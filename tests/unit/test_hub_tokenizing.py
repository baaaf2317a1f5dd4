"""Tokenizing: the tokenizer's own ids, its own errors, and an end to endless expressions."""

from __future__ import annotations

import pytest
from tokenizers import Regex, normalizers

from mppo.hub import tokenizing
from mppo.hub.builtin import byte_tokenizer
from mppo.hub.tokenizing import tokens_of
from mppo.recipe.errors import ConfigError


@pytest.mark.parametrize("special", [False, True])
def test_tokens_are_the_tokenizers(special):
    tokenizer, texts = byte_tokenizer(), ["one", "", "two words"]
    want = tokenizer(texts, add_special_tokens=special)["input_ids"]
    assert tokens_of(tokenizer, texts, special) == want


def test_an_error_of_the_tokenizer_is_raised():
    with pytest.raises(TypeError):
        tokens_of(byte_tokenizer(), [None])  # pyright: ignore[reportArgumentType]


def tokenizer_with(expression: str):
    tokenizer = byte_tokenizer()
    tokenizer.name_or_path = "a/model"
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex(expression), "")
    return tokenizer


def test_a_tokenizer_that_takes_too_long_is_named(monkeypatch):
    monkeypatch.setattr(tokenizing, "LIMIT_S", 0.2)
    monkeypatch.setattr(tokenizing, "CHARACTERS_PER_S", 1e9)
    with pytest.raises(ConfigError, match=r"(?s)a/model.*longer than 0 s for 60,000 characters"):
        tokens_of(tokenizer_with("(a+)(?=b)"), ["a" * 60_000])


def test_a_tokenizer_whose_code_breaks_off_is_named():
    with pytest.raises(ConfigError, match=r"(?s)a/model.*its tokenizer fails: .*retry-limit"):
        tokens_of(tokenizer_with("(a|aa)+b"), ["a" * 40_000])

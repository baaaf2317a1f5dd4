"""Scores of responses as a flat table of numbers, which ranks exchange.

A table is one int64 tensor. Its parts, one after the other:

- the number of scores, of columns, and of bytes of names and of texts;
- for each score its key and its flags, 8 bytes;
- the scores, float64;
- for each column one bit per score: whether it has this number;
- the numbers that there are, float64, column by column;
- the names of the columns.

The first column is the sum of the token rewards. Texts (messages of errors, answers) are bytes of
their own, because only the rank that logs them needs them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mppo.rewards.scores import UNSCORED, ResponseScore

_REASONS = (None, *UNSCORED)
_RIGHT = (None, False, True)
_FLAG_BITS = 8
_ERROR, _ANSWER, _REWARDS = 1, 2, 4
_RIGHT_AT, _REASON_AT = 3, 5
_HEADER = 4


class ReadTable(NamedTuple):
    """What a table says.

    Args:
        scores: by key, without token rewards; texts are empty.
        rewarded: keys of the responses with token rewards, in order.
        text_bytes: size of the texts that belong to the table.
    """

    scores: dict[int, ResponseScore]
    rewarded: list[int]
    text_bytes: int


def score_table(scores: Mapping[int, ResponseScore]) -> tuple[Tensor, Tensor]:
    """Write scores as a table and texts.

    Args:
        scores: by key, which is not negative and below 2^55.

    Returns:
        The table, int64 ``[N]``; and the texts, uint8 ``[M]``.
    """
    columns: dict[str, tuple[list[int], list[float]]] = {}
    totals: tuple[list[int], list[float]] = ([], [])
    words, texts = [], []
    for place, (key, each) in enumerate(scores.items()):
        words.append(key << _FLAG_BITS | _flags(each))
        texts += [text for text in (each.error, each.answer) if text is not None]
        if each.token_total or each.token_rewards:
            totals[0].append(place)
            totals[1].append(each.token_total)
        for name, value in each.numbers.items():
            places, values = columns.setdefault(name, ([], []))
            places.append(place)
            values.append(value)
    found = [totals, *columns.values()]
    present = np.zeros((len(found), len(scores)), dtype=bool)
    for row, (places, _) in zip(present, found, strict=True):
        row[places] = True
    names = _encoded(list(columns))
    text = _encoded(texts) if texts else np.empty(0, np.uint8)
    parts = [
        np.array([len(scores), len(found), len(names), len(text), *words], dtype=np.int64),
        np.array([each.score for each in scores.values()], dtype=np.float64).view(np.int64),
        _words(np.packbits(present)),
        *(np.array(values, dtype=np.float64).view(np.int64) for _, values in found),
        _words(names),
    ]
    return torch.from_numpy(np.concatenate(parts)), torch.from_numpy(text)


def read_score_table(table: Tensor) -> ReadTable:
    """The inverse of ``score_table``, except texts and token rewards."""
    numbers = table.numpy()
    count, width, name_bytes, text_bytes = numbers[:_HEADER].tolist()
    rest = numbers[_HEADER:]
    words, scores, rest = rest[:count], rest[count : 2 * count].view(np.float64), rest[2 * count :]
    bits = -(-count * width // 64)
    unpacked = np.unpackbits(rest[:bits].view(np.uint8), count=count * width)
    present, rest = unpacked.reshape(width, count).astype(bool), rest[bits:]
    amounts = present.sum(1).tolist()
    values, rest = rest[: sum(amounts)].view(np.float64), rest[sum(amounts) :]
    extra: list[dict[str, float]] = [{} for _ in range(count)]
    parts = np.split(values, np.cumsum(amounts[:-1]))
    totals = dict(zip(present[0].nonzero()[0].tolist(), parts[0].tolist(), strict=True))
    names = json.loads(rest.tobytes()[:name_bytes])
    for name, row, part in zip(names, present[1:], parts[1:], strict=True):
        for place, value in zip(row.nonzero()[0].tolist(), part.tolist(), strict=True):
            extra[place][name] = value
    found: dict[int, ResponseScore] = {}
    rewarded = []
    for place, (word, score) in enumerate(zip(words.tolist(), scores.tolist(), strict=True)):
        key, flags = divmod(word, 1 << _FLAG_BITS)
        found[key] = _score(flags, score, extra[place], totals.get(place, 0.0))
        if flags & _REWARDS:
            rewarded.append(key)
    return ReadTable(found, rewarded, text_bytes)


def with_texts(scores: Mapping[int, ResponseScore], text: Tensor) -> dict[int, ResponseScore]:
    """The scores of a table with their texts.

    Args:
        scores: all scores of the table, in order.
        text: the texts that belong to it, uint8.
    """
    texts = iter(json.loads(text.numpy().tobytes()) if len(text) else ())
    return {
        key: replace(
            each,
            error=None if each.error is None else next(texts),
            answer=None if each.answer is None else next(texts),
        )
        for key, each in scores.items()
    }


def _flags(score: ResponseScore) -> int:
    return (
        (_ERROR if score.error is not None else 0)
        | (_ANSWER if score.answer is not None else 0)
        | (_REWARDS if score.token_rewards else 0)
        | _RIGHT.index(score.right) << _RIGHT_AT
        | _REASONS.index(score.unscored) << _REASON_AT
    )


def _score(flags: int, score: float, numbers: dict[str, float], total: float) -> ResponseScore:
    return ResponseScore(
        score,
        numbers,
        "" if flags & _ERROR else None,
        _REASONS[flags >> _REASON_AT],
        total,
        answer="" if flags & _ANSWER else None,
        right=_RIGHT[flags >> _RIGHT_AT & 3],
    )


def _encoded(texts: Sequence[str]) -> np.ndarray:
    """Texts as bytes of JSON, which can hold halves of surrogate pairs."""
    return np.frombuffer(bytearray(json.dumps(texts).encode()), dtype=np.uint8)


def _words(values: np.ndarray) -> np.ndarray:
    """Bytes as int64 numbers, filled up with zeros."""
    return np.pad(values, (0, -len(values) % 8)).view(np.int64)

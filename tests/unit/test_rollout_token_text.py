"""Tokens and log-probabilities are read from the text of an answer as a JSON parser reads them."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mppo.rollout.sglang.token_text import ENTRIES, IDS, parse_generated

HOSTILE_TEXT = '"output_ids":[1,2],"output_token_logprobs":[[-0.5,7,null]] \\" ]]'


def answer(logprobs: list[float | None], ids: list[int], **extra: Any) -> dict[str, Any]:
    entries = [(value, token, None) for value, token in zip(logprobs, ids)]
    meta = {"finish_reason": {"type": "stop"}, ENTRIES: entries, "weight_version": "3"}
    return {"text": HOSTILE_TEXT, IDS: ids, "meta_info": meta, **extra}


def compact(answers: Any) -> bytes:
    """As SGLang writes it, with orjson."""
    return json.dumps(answers, separators=(",", ":")).encode()


def tokens_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [each["meta_info"][ENTRIES][0].tolist() for each in answers]


def bits_of(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [each["meta_info"][ENTRIES][1].view(torch.int32).tolist() for each in answers]


def as_float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


FLOATS = st.floats(-700.0, 0.0, width=32, allow_subnormal=False) | st.floats(
    -(2.0**-20), 0.0, width=32, allow_subnormal=False
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.tuples(FLOATS, st.integers(0, 999_999)), max_size=40), max_size=4))
def test_every_float32_is_read_exactly(rows: list[list[tuple[float, int]]]) -> None:
    values = [[value for value, _ in row] for row in rows]
    ids = [[token for _, token in row] for row in rows]
    answers = [answer(*each) for each in zip(values, ids, strict=True)]
    found = parse_generated(compact(answers))
    assert tokens_of(found) == ids
    assert bits_of(found) == [torch.tensor(v).view(torch.int32).tolist() for v in values]
    assert [each[IDS] for each in found] == [len(row) for row in rows]
    assert all(each["text"] == HOSTILE_TEXT for each in found)


def by_json(text: bytes) -> list[tuple[list[int], list[int]]] | None:
    """Ids and bits of log-probabilities by a JSON parser; None if it refuses the text."""
    try:
        answers = json.loads(text)
        rows = [each["meta_info"][ENTRIES] for each in answers]
        ids = [torch.tensor([entry[1] for entry in row], dtype=torch.int32) for row in rows]
        values = [[math.nan if e[0] is None else e[0] for e in row] for row in rows]
        bits = [torch.tensor(row, dtype=torch.float32).view(torch.int32) for row in values]
        return [(i.tolist(), b.tolist()) for i, b in zip(ids, bits, strict=True)]
    except (ValueError, LookupError, TypeError, RuntimeError):
        return None


def by_text(text: bytes) -> list[tuple[list[int], list[int]]] | None:
    try:
        found = parse_generated(text)
        return list(zip(tokens_of(found), bits_of(found), strict=True))
    except ValueError:
        return None


NUMBERS = st.one_of(
    FLOATS.map(repr),
    st.floats(-1e4, 0.0).map(repr),
    # halves of float32, which a parser must round to even
    st.builds(
        lambda n, k: repr(-(2 * n + 1) / (1 << k)), st.integers(1, 1 << 24), st.integers(15, 26)
    ),
    st.from_regex(r"\A-?(0|[1-9]\d{0,4})(\.\d{1,24})?([eE][-+]?\d{1,2})?\Z"),
    st.sampled_from(["-0.0", "0.0", "-0", "null", "NaN", "-Infinity", "-1.5e-45", "1e400", "00.5"]),
)
IDS_AS_TEXT = st.one_of(
    st.integers(0, 999_999).map(str), st.sampled_from(["10000000", "1" * 30, "-1", "07", "1.5"])
)


def body(rows: list[list[tuple[str, str]]]) -> bytes:
    answers = compact([answer([], [0] * len(row)) for row in rows]).decode().split(f'"{ENTRIES}":[')
    texts = [",".join(f"[{value},{token},null]" for value, token in row) for row in rows]
    return f'"{ENTRIES}":['.join([answers[0], *map("".join, zip(texts, answers[1:]))]).encode()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.tuples(NUMBERS, IDS_AS_TEXT), max_size=8), min_size=1, max_size=3))
def test_any_number_is_read_as_by_a_json_parser(rows: list[list[tuple[str, str]]]) -> None:
    text = body(rows)
    assert by_text(text) == by_json(text)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(NUMBERS, st.integers(0, 999_999).map(str)), min_size=1, max_size=4),
    st.data(),
)
def test_a_changed_or_cut_text_is_read_as_by_a_json_parser(
    row: list[tuple[str, str]], data: st.DataObject
) -> None:
    """Only in the entries: elsewhere a key may change, and an answer without entries has none."""
    text = body([row, [("-0.25", "5")]])
    first = text.index(f'"{ENTRIES}":['.encode()) + len(ENTRIES) + 4
    place = data.draw(st.integers(first, text.index(b"]]", first) + 1))
    length = data.draw(st.integers(0, 3))
    new = data.draw(st.text("0123456789.,-+eE[]nul \xac\xd3", max_size=3)).encode("latin1")
    text = text[:place] + new + text[place + length :]
    assert by_text(text) == by_json(text)
    assert by_text(text[:place]) is None


def test_numbers_of_one_response_do_not_depend_on_the_others() -> None:
    rows = [[("-1.1920928955078125e-7", "11"), ("-12.5", "2")], [("-0.5", "7")] * 5, [("0.0", "1")]]
    assert by_text(body(rows)) == [by_text(body([row]))[0] for row in rows]
    odd = [*rows, [("null", "3")]]
    assert by_text(body(odd))[:3] == by_text(body(rows))


def test_a_long_response_is_read_in_pieces() -> None:
    torch.manual_seed(0)
    exact = -torch.rand(30_000) * 10.0 ** torch.randint(-9, 2, (30_000,))
    ids = torch.randint(0, 200_000, (30_000,)).tolist()
    (found,) = parse_generated(compact([answer(exact.tolist(), ids)]))
    assert tokens_of([found]) == [ids]
    assert torch.equal(found["meta_info"][ENTRIES][1], exact)


@pytest.mark.parametrize(
    "write",
    [
        lambda answers: json.dumps(answers).encode(),
        lambda answers: compact(answers).replace(b"-0.5", b"-5e-1"),
        lambda answers: compact(answers).replace(b"-0.5", b"-0.500000000000000000000000000"),
        lambda answers: compact(answers).replace(b"-2048.5", b"-2.0485e3"),
    ],
)
def test_other_ways_to_write_the_same_numbers(write) -> None:
    answers = [answer([-0.5, -2048.5], [3, 4]), answer([-0.5], [5])]
    found = parse_generated(write(answers))
    assert tokens_of(found) == [[3, 4], [5]]
    assert [each["meta_info"][ENTRIES][1].tolist() for each in found] == [[-0.5, -2048.5], [-0.5]]
    single = parse_generated(write(answers[1]))
    assert tokens_of([single]) == [[5]]


def test_a_log_probability_that_is_not_finite_is_a_nan() -> None:
    """SGLang writes null; the run then ends with the prompt's number and the weights' version."""
    found = parse_generated(compact([answer([-0.5, None], [3, 4]), answer([-0.25], [5])]))
    assert math.isnan(found[0]["meta_info"][ENTRIES][1][1])
    assert tokens_of(found) == [[3, 4], [5]]


def test_a_response_without_tokens_has_empty_tensors() -> None:
    found = parse_generated(compact([answer([], []), answer([-0.25], [5])]))
    assert tokens_of(found) == [[], [5]]
    assert [each[IDS] for each in found] == [0, 1]
    without = {"output_ids": [], "meta_info": {}}
    assert tokens_of([parse_generated(compact(without))]) == [[]]


@pytest.mark.parametrize(
    "entries",
    [
        "[1.0,2,null]]", "[1.x,3,null]", "[1.0e,3,null]", "[1.0,-,null]", "[1.0,,null]",
        "[--1.0,3,null]", "[1.0,3,null],", "[1.0,3,null,]", "[1.,3,null]x", "[,,null]", ",,",
        "[1.2.3,4,null],[5,6,null]", "[1e1.5,4,null]", "[1.5e-1e2,4,null]", "[1.5,4,nulle",
        "[e1.0,3,null]", "[1.5,4,null],[2.5,6,null", "[-0.5,3_4,null]", "[-0.5,1e400,null]",
    ],
)  # fmt: skip
def test_malformed_entries_are_an_error(entries: str) -> None:
    before, after = compact([answer([], [1])]).decode().split(f'"{ENTRIES}":[]')
    text = f'{before}"{ENTRIES}":[{entries}]{after}'
    with pytest.raises(ValueError):
        parse_generated(text.encode())


@pytest.mark.parametrize(
    "text",
    [
        "[3]", '[{"meta_info":{}}]', '{"output_ids":[1]}', '{"output_ids":7,"meta_info":{}}',
        '{"output_ids":[1],"meta_info":{"output_token_logprobs":9}}',
        '{"output_ids":[1],"meta_info":{"output_token_logprobs":[3]}}',
        '{"output_ids":[1],"meta_info":{"output_token_logprobs":[["a",3]]}}',
        '{"output_ids":[1],"output_ids":[1],"meta_info":{}}', '{"output_ids":[1', "{",
    ],
)  # fmt: skip
def test_an_answer_of_another_form_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_generated(text.encode())

"""Tokens and log-probabilities from the text of SGLang's answers, as tensors.

SGLang returns log-probabilities as ``[[-0.69,17,null],[-1.2e-7,4,null]]``: log-probability, token
id, no text. A JSON parser makes three objects of each entry, and the garbage collector visits them
again and again. Here eight characters at a time are read as one 64-bit integer and converted with
a few operations on all entries at once (D. Lemire, "Quickly parsing eight digits", 2018). The JSON
parser gets the rest of the answer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mppo.safety.bounded_http import parse_answer

TokenTensors = tuple[Tensor, Tensor]
"""Token ids, int32 ``[L]``, and their log-probabilities, float32 ``[L]``."""

T = TypeVar("T")
ENTRIES, IDS = "output_token_logprobs", "output_ids"

_Ints = NDArray[np.int64]
_Words = NDArray[np.uint64]

_PIECE_BYTES = 3 << 15
"""Text parsed at once: some 3,000 entries. Their temporary arrays stay in the cache, and are small
enough (128 KiB) for the allocator to use the same memory again."""
_PAD = b"\0" * 32
"""Around the text, since eight characters are read at and before every number."""
_DECIMALS = 16
"""Decimals that are read. SGLang writes up to 21, because it converts float32 to float64; for a
number of at least 1e-8 without its exponent, 16 decide which float32 it is."""
_POWERS = np.array([float(f"1e-{exponent}") for exponent in range(100)])


def _word(text: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(text, "little"))


_BYTE = np.uint64(0xFF)
_ZEROS = _word(b"0" * 8)
_BETWEEN, _END = _word(b",null],["), _word(b",null]\0\0")
_MINUS, _POINT, _ZERO = (np.uint64(char) for char in b"-.0")


class _OtherForm(Exception):
    """The text of entries has another form than SGLang's."""


def parse_generated(text: bytes) -> Any:
    """Parse an answer to ``/generate``.

    Args:
        text: JSON of one answer or of a list of answers.

    Returns:
        As ``parse_answer``, except that ``output_ids`` is the number of tokens, and
        ``output_token_logprobs`` in ``meta_info`` is ``TokenTensors``.

    Raises:
        ValueError: as ``parse_answer``; or the answer does not have this form.
    """
    entries: list[TokenTensors] = []
    counts: list[int] = []
    rest = _cut(text, b'"output_token_logprobs":[[', b",null]]", _parse_entries, entries)
    answers = parse_answer(_cut(rest, b'"output_ids":[', b"]", _count, counts))
    try:
        for answer in answers if isinstance(answers, list) else [answers]:
            ids, meta = answer[IDS], answer["meta_info"]
            answer[IDS] = counts[ids] if isinstance(ids, int) else len(ids)
            found = meta.get(ENTRIES)
            at_once = isinstance(found, int)
            meta[ENTRIES] = entries[found] if at_once else _read_entries(found or [])
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"not an answer with tokens: {type(error).__name__} {error}") from error
    return answers


def _cut(
    text: bytes, key: bytes, end: bytes, convert: Callable[[bytes], T | None], found: list[T]
) -> bytes:
    """Convert the arrays under a key, and replace each in the text by its index in ``found``.

    Inside a JSON string every quotation mark follows a backslash, so no string holds ``key``.

    Args:
        text: JSON.
        key: from the quotation mark to the brackets that open the array.
        end: up to the brackets that close it.
        convert: converts what the outermost brackets enclose; None: leave the array in the text.
        found: gets the results.
    """
    kept, at, place = [], 0, text.find(key)
    while place >= 0:
        opens = text.index(b"[", place)
        # numbers hold no quotation mark, and one character is found much faster than several
        quote = text.find(b'"', opens)
        last = text.rfind(end, opens, quote if quote >= 0 else len(text))
        closes = last + len(end) - 1
        value = convert(text[opens + 1 : closes]) if last >= 0 else None
        if value is not None:
            kept += [text[at:opens], str(len(found)).encode()]
            found.append(value)
            at = closes + 1
        place = text.find(key, max(at, place + len(key)))
    return b"".join([*kept, text[at:]])


def _count(ids: bytes) -> int | None:
    """Number of ids; None if the text holds more than one array."""
    if b"]" in ids:
        return None
    commas = np.count_nonzero(np.frombuffer(ids, dtype=np.uint8) == ord(","))
    return int(commas) + 1 if ids else 0


def _read_entries(entries: list[list[Any]]) -> TokenTensors:
    """The entries of one response, in any other form than SGLang's.

    SGLang writes ``null`` for a log-probability that is not finite.
    """
    logprobs = [math.nan if entry[0] is None else entry[0] for entry in entries]
    ids = [entry[1] for entry in entries]
    return torch.tensor(ids, dtype=torch.int32), torch.tensor(logprobs, dtype=torch.float32)


def _parse_entries(text: bytes) -> TokenTensors | None:
    """The entries of one response: ``[x,id,null],[x,id,null]``.

    Returns:
        None if the text has any other form, such as spaces or ``null`` for a NaN. A number that
        float32 can represent, as every one of SGLang's, is read exactly; another one may be rounded
        the other way where two are equally near.
    """
    if sys.byteorder != "little":
        return None
    ids, values = [], []
    try:
        for piece in _pieces(text):
            found = _parse_piece(piece)
            ids.append(found[0])
            values.append(found[1])
    except _OtherForm:
        return None
    if len(ids) > 1:
        ids, values = [np.concatenate(ids)], [np.concatenate(values)]
    return torch.from_numpy(ids[0]), torch.from_numpy(values[0])


def _pieces(text: bytes) -> Iterator[bytes]:
    """Cut a text between entries."""
    start = 0
    while start < len(text):
        cut = text.find(b"],[", start + _PIECE_BYTES)
        end = len(text) if cut < 0 else cut + 1
        yield text[start:end]
        start = end + 1


def _parse_piece(text: bytes) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids and log-probabilities of entries ``[-12.5,17,null],[-1.25e-07,4,null]``.

    Raises:
        _OtherForm: the text has another form.
    """
    chars = np.frombuffer(_PAD + text + _PAD, dtype=np.uint8)
    # eight characters from every position, as overlapping little-endian integers
    words = np.ndarray((len(chars) - 7,), "<u8", chars, strides=(1,))
    commas = np.flatnonzero(chars == ord(","))
    _require(text.startswith(b"[") and len(commas) % 3 == 2)
    end, id_end = commas[0::3].copy(), commas[1::3].copy()
    separator = words[id_end]
    _require(separator[-1] == _END and (separator[:-1] == _BETWEEN).all())
    start = np.empty_like(end)
    start[0], start[1:] = len(_PAD) + 1, id_end[:-1] + len(",null],[")

    negative = chars[start] == ord("-")
    start += negative
    # the point is the first, second or third character behind the first digit
    head = words[start]
    point = start + 1
    units = (head & _BYTE) ^ _ZERO
    row = np.flatnonzero((head >> np.uint64(8) & _BYTE) != _POINT)
    if len(row):
        point[row] += 1 + ((head[row] >> np.uint64(16) & _BYTE) != _POINT)
        _require((chars[point[row]] == _POINT).all())
        units[row] = _digits(head[row][None], (point - start)[row][None])[0]
    power, last, exponents = _exponents(chars, words, end)
    decimals = last - point
    decimals -= 1
    _require(decimals.min() > 0)
    # every other character must be a digit: [-0.5e-7,17,null],
    others = 10 * len(end) - 1 + np.count_nonzero(negative) + 2 * exponents
    _require(np.count_nonzero((chars - ord("0")) < 10) == len(text) - others)

    # all digits at once: id, and two groups of decimals
    width = np.empty((3, len(end)), dtype=np.int64)
    digits = np.empty((3, len(end)), dtype=np.uint64)
    np.subtract(id_end, end + 1, out=width[0])
    np.minimum(decimals, 8, out=width[1])
    np.minimum(decimals - width[1], 8, out=width[2])
    digits[0], digits[1], digits[2] = words[end + 1], words[point + 1], words[point + 9]
    ids, high, low = _digits(digits, width)
    _require(not ((decimals > _DECIMALS) & (units + high == 0)).any())
    total = (high * np.uint64(10**8) + low) * 1e-16
    total += units
    total *= power
    np.negative(total, out=total, where=negative)
    return ids.astype(np.int32), total.astype(np.float32)


def _exponents(
    chars: NDArray[np.uint8], words: _Words, end: _Ints
) -> tuple[NDArray[np.float64] | float, _Ints, int]:
    """Powers of ten by which numbers are multiplied, where their decimals end, and how many.

    Args:
        chars: the text.
        words: the eight characters from every position of it.
        end: of the numbers; an exponent is ``e-7``, ``e-07`` or ``e-17``.
    """
    short, long = chars[end - 3] == ord("e"), chars[end - 4] == ord("e")
    row = np.flatnonzero(short | long)
    if not len(row):
        return 1.0, end, 0
    last = end.copy()
    last[row] -= np.where(short[row], 3, 4)
    sign = last[row] + 1
    _require(((words[sign] & _BYTE) == _MINUS).all())
    size = _digits(words[sign + 1][None], (end[row] - sign - 1)[None])[0]
    _require(size.max() < len(_POWERS))
    power = np.ones(len(end))
    power[row] = _POWERS[size]
    return power, last, len(row)


def _digits(words: _Words, width: _Ints) -> _Words:
    """The integers of up to eight digits each: uint64 ``[K, L]``.

    Args:
        words: ``[K, L]``, eight characters each, which begin with the digits; overwritten.
        width: ``[K, L]``, number of digits. In the first row there is at least one, and ``12`` is
            12; in the others ``12`` is 12000000.
    """
    _require(width.max() <= 8 and width[0].min() > 0)
    unused = (64 - 8 * width).view(np.uint64)
    words ^= _ZEROS
    words <<= unused  # drops what follows the digits; a shift by 64 gives 0
    words[1:] >>= unused[1:]
    # pairs of digits, then fours, then eight
    for scale, bits, mask in (
        (10, 8, 0x00FF00FF00FF00FF),
        (100, 16, 0x0000FFFF0000FFFF),
        (10000, 32, 0x00000000FFFFFFFF),
    ):
        second = words >> np.uint64(bits)
        words *= np.uint64(scale)
        words += second
        words &= np.uint64(mask)
    return words


def _require(holds: bool | np.bool_) -> None:
    if not holds:
        raise _OtherForm

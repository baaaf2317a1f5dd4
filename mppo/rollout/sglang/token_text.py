"""Tokens and log-probabilities from the text of SGLang's answers, as tensors.

SGLang returns log-probabilities as ``[[-0.69,17,null],[-1.2e-7,4,null]]``: log-probability, token
id, no text; it has no binary form of them. A JSON parser makes three objects of each entry, and the
garbage collector visits them again and again. Here eight characters at a time are read as one
64-bit integer and converted with a few operations on the entries of all responses at once (D.
Lemire, "Quickly parsing eight digits", 2018). The JSON parser gets the rest of the answer.
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
_OPENS, _CLOSES = b'"output_token_logprobs":[[', b",null]]"

_Octets = NDArray[np.uint8]
_Ints = NDArray[np.int64]
_Words = NDArray[np.uint64]

_PIECE_BYTES = 3 << 16
"""Text parsed at once: some 6,000 entries. Numpy's cost of a call is divided among them; with more,
the memory allocator returns their temporary arrays to the system each time."""
_PAD = b"\0" * 31
"""Around the text, since some characters are read before and behind every number."""
_FRONT = len(_PAD) + len(",")
_DECIMALS = 14
"""Decimals that are read at once. Where the others could change the float32, ``float`` decides; for
a number that float32 represents, as every one of SGLang's, that is rare."""
_POWERS = np.array([float(f"1e-{exponent}") for exponent in range(100)])


def _word(text: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(text, "little"))


_BYTE, _SECOND = np.uint64(0xFF), np.uint64(0xFF00)
_COMMAS, _ZEROS, _TOP_BITS = _word(b"," * 8), _word(b"0" * 8), _word(b"\x80" * 8)
_UNIT_AND_POINT = _word(b"0.000000")
_BETWEEN, _END, _SIX = _word(b",null],["), _word(b",null]"), _word(b"\xff" * 6)


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
    counts: list[int] = []
    texts: list[bytes] = []
    rest = _cut(text, _OPENS, _CLOSES, bytes, texts)
    try:
        entries = _parse_entries(texts)
    except _OtherForm:  # then each response alone
        entries = []
        rest = _cut(text, _OPENS, _CLOSES, _parse_alone, entries)
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


def _parse_alone(text: bytes) -> TokenTensors | None:
    """The entries of one response; None if they have another form than SGLang's."""
    try:
        return _parse_entries([text])[0]
    except _OtherForm:
        return None


def _parse_entries(texts: list[bytes]) -> list[TokenTensors]:
    """The entries of each response, ``[x,id,null],[x,id,null]``.

    The float32 are those of a JSON parser's float64.

    Raises:
        _OtherForm: a text has any other form, such as spaces or ``null`` for a NaN.
    """
    _require(sys.byteorder == "little")
    if not texts:
        return []
    padded = b",".join([_PAD, *texts, _PAD])
    pieces = [_parse_piece(padded, *place) for place in _pieces(padded)]
    ends, ids, logprobs = (np.concatenate(arrays) for arrays in zip(*pieces))
    cuts = np.searchsorted(ends, _FRONT + np.cumsum([len(text) + 1 for text in texts]))
    # copies, since a response may be kept without the others
    return [
        (torch.from_numpy(ids[a:b].copy()), torch.from_numpy(logprobs[a:b].copy()))
        for a, b in zip([0, *cuts], cuts)
    ]


def _pieces(padded: bytes) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of parts of a text, cut between entries."""
    start, last = _FRONT, len(padded) - _FRONT
    while start < last:
        cut = padded.find(b"],[", start + _PIECE_BYTES)
        end = last if cut < 0 else cut + 1
        yield start, end
        start = end + 1


def _parse_piece(
    padded: bytes, low: int, high: int
) -> tuple[_Ints, NDArray[np.int32], NDArray[np.float32]]:
    """Positions of ``null``, ids and log-probabilities of ``[-12.5,17,null],[-1.25e-07,4,null]``.

    Args:
        padded: the entries of all responses, between ``_PAD`` and commas.
        low, high: beginning and end of the entries in the text.

    Raises:
        _OtherForm: the entries have another form.
    """
    chars = np.frombuffer(padded, np.uint8, high - low + 2 * _FRONT, low - _FRONT)
    text, size = chars[_FRONT:-_FRONT], high - low
    # 16 characters from every position, as overlapping items: the time to copy one does not depend
    # on its size
    pairs = np.ndarray((len(chars) - 15,), "V16", chars, strides=(1,))

    null = _FRONT + _positions(text, ord("n"))
    _require(len(null) > 0)
    start = np.empty_like(null)
    start[0], start[1:] = _FRONT + 1, null[:-1] + len("null],[")
    negative = chars[start] == ord("-")
    start += negative
    before = pairs[null - 9].view(np.uint64).reshape(-1, 2)  # id, then what separates entries
    separator = before[:, 1]
    _require(null[-1] == _FRONT + size - len("null]") and text[0] == ord("["))
    _require((separator[-1] & _SIX) == _END and (separator[:-1] == _BETWEEN).all())

    digits = np.empty((3, len(null)), dtype=np.uint64)  # id, unit and decimals, further decimals
    comma = _read_ids(before[:, 0], digits[0])
    end = null - 9 + comma
    _require(not ((chars[end + 1] == ord("0")) & (comma < 6)).any())  # JSON has no 07
    power, last, exponents = 1.0, end, 0
    if padded.find(b"e", low, high) >= 0:
        power, last, exponents = _exponents(chars, end)
    # every other character must be a digit: [-0.5e-7,17,null],
    others = 10 * len(null) - 1 + np.count_nonzero(negative) + 2 * exponents
    _require(np.count_nonzero((text - ord("0")) < 10) == size - others)

    first, tens = _read_decimals(pairs, start, last, digits[1:])
    _convert(digits)
    total = (digits[1] * np.uint64(10**8) + digits[2]) * 1e-14
    total[first] += tens
    # bounds of the number: decimals that were not read, and roundings
    error = total * 2.0**-50
    error += (last - start > _DECIMALS + 2) * 1.1e-14
    total, error = total * power, error * power
    values = total.astype(np.float32)
    for row in np.flatnonzero((total - error).astype(np.float32) != (total + error).astype("f4")):
        place = low - _FRONT + end[row]
        values[row] = float(padded[padded.rfind(b"[", 0, place) + 1 : place])
    values.view(np.uint32)[...] |= negative.astype(np.uint32) << np.uint32(31)
    return null + (low - _FRONT), digits[0].astype(np.int32), values


def _positions(text: _Octets, char: int) -> _Ints:
    """Where a character is that occurs at most once in eight characters."""
    mask = np.zeros(-(-len(text) // 8) * 8, dtype=bool)
    np.equal(text, char, out=mask[: len(text)])
    words = mask.view(np.uint64)
    place = np.flatnonzero(words != 0)  # branch-free, unlike that of sparse characters
    # the exponent of 256**k as a float64 is 1023 + 8 * k
    within = (words[place].astype(np.float64).view(np.int64) >> 55) - 127
    return (place << 3) + within


def _read_ids(before: _Words, digits: _Words) -> _Ints:
    """Read the ids at the end of eight characters each, behind a comma.

    Args:
        before: the characters, ``[L]``.
        digits: becomes the ids' digits, as bytes that follow zeros.

    Returns:
        Where the comma is, 0 to 6.
    """
    _require(not (before & _TOP_BITS).any())
    # a byte of the difference has its top bit where the character is a comma
    found = _TOP_BITS - (before ^ _COMMAS)
    found &= _TOP_BITS
    comma = (found.astype(np.float64).view(np.int64) >> 55) - 128
    _require(comma.min() >= 0 and comma.max() < 7)
    unused = ((comma + 1) << 3).view(np.uint64)
    np.bitwise_xor(before, _ZEROS, out=digits)
    digits >>= unused
    digits <<= unused
    return comma


def _exponents(chars: _Octets, end: _Ints) -> tuple[NDArray[np.float64], _Ints, int]:
    """Powers of ten by which numbers are multiplied, where their decimals end, and how many.

    Args:
        chars: the text.
        end: of the numbers; an exponent is ``e-7``, ``e-07`` or ``e-17``.
    """
    short, long = chars[end - 3] == ord("e"), chars[end - 4] == ord("e")
    row = np.flatnonzero(short | long)
    last = end.copy()
    last[row] -= np.where(short[row], 3, 4)
    _require((chars[last[row] + 1] == ord("-")).all())
    tens, ones = (chars[end[row] - place].astype(np.int64) - ord("0") for place in (2, 1))
    size = np.where(short[row], 0, tens) * 10 + ones
    _require(((size >= 0) & (size < len(_POWERS))).all())
    power = np.ones(len(end))
    power[row] = _POWERS[size]
    return power, last, len(row)


def _read_decimals(
    pairs: NDArray[np.void], start: _Ints, last: _Ints, digits: _Words
) -> tuple[_Ints, _Ints]:
    """Read numbers ``123.456``, of which 14 decimals.

    Args:
        pairs: 16 characters from every position of the text.
        start: of the numbers; moves to the digit before the point.
        last: end of their decimals.
        digits: becomes ``[2, L]``, the digit before the point and six decimals, eight decimals; as
            bytes.

    Returns:
        The numbers that have digits before that one, and the value of those.
    """
    words = pairs[start].view(np.uint64).reshape(-1, 2)
    np.bitwise_xor(words[:, 0], _UNIT_AND_POINT, out=digits[0])
    row, tens = np.flatnonzero(digits[0] & _SECOND), np.empty(0, dtype=np.int64)
    if len(row):
        text = words[row].view(np.uint8).astype(np.int64)
        three = text[:, 2] != ord(".")
        _require((text[~three, 2] == ord(".")).all() and (text[three, 3] == ord(".")).all())
        value = text - ord("0")
        _require((value[:, 0] > 0).all())
        tens = 10 * np.where(three, 10 * value[:, 0] + value[:, 1], value[:, 0])
        start[row] += 1 + three
        words[row] = pairs[start[row]].view(np.uint64).reshape(-1, 2)
        digits[0, row] = words[row, 0] ^ _UNIT_AND_POINT
    np.bitwise_xor(words[:, 1], _ZEROS, out=digits[1])
    digits[0] += (digits[0] & _BYTE) * _BYTE  # moves the unit to the place of the point

    decimals = last - start
    decimals -= 2
    _require(decimals.min() > 0)
    short = np.flatnonzero(decimals < _DECIMALS)
    if len(short):
        missing = np.empty((2, len(short)), dtype=np.int64)
        np.maximum(6 - decimals[short], 0, out=missing[0])
        np.minimum(14 - decimals[short], 8, out=missing[1])
        unused = (missing << 3).view(np.uint64)
        digits[:, short] = (digits[:, short] << unused) >> unused  # a shift by 64 gives 0
    return row, tens


def _convert(digits: _Words) -> None:
    """Replace eight digits, the bytes of an integer from its lowest one, by the number."""
    for scale, bits, mask in (
        (10, 8, 0x00FF00FF00FF00FF),
        (100, 16, 0x0000FFFF0000FFFF),
        (10000, 32, 0x00000000FFFFFFFF),
    ):
        second = digits >> np.uint64(bits)
        digits *= np.uint64(scale)
        digits += second
        digits &= np.uint64(mask)


def _require(holds: bool | np.bool_) -> None:
    if not holds:
        raise _OtherForm

"""Records of jsonl, json and parquet files, with their places for messages.

Compression and dictionaries let a parquet file of a kilobyte hold a text of a megabyte a thousand
times. Texts are therefore read as numbers of a dictionary, and their total length is known before
any row is made.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mppo.recipe.errors import config_error
from mppo.recipe.sections.data import DATA_FORMS
from mppo.safety.input_error import InputError
from mppo.safety.input_files import open_file, parse_json, read_text

MAX_LINE_BYTES = 64 << 20
MAX_ROWS, ROWS_AT_ONCE = 100_000_000, 1024
"""Most rows of a file; rows that are decoded at once."""
MAX_VALUES = 1 << 27
"""Most values of one column in one row group: a row's list can claim to hold a value a billion
times."""
MIN_BYTES, MAX_RATIO = 1 << 28, 100
"""The rows of a file may have ``MIN_BYTES``, or ``MAX_RATIO`` times the file's size if it is
more."""
_VALUE_BYTES = 8
"""Bytes that a value has beside its text: a reference to it."""
_BETWEEN_ITEMS = re.compile(r"[\s,]*")


@dataclass(frozen=True)
class Unreadable:
    """A line that could not be parsed, and why."""

    line: bytes
    why: str


def read_records(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    """Yield place (file and line) and content of each record of a .jsonl, .ndjson, .json or
    .parquet file: what JSON or parquet holds, or ``Unreadable``.

    Raises:
        ConfigError: another ending, or an unreadable parquet file.
        OSError, InputError: the file is missing or cannot be read.
    """
    if path.suffix in (".jsonl", ".ndjson"):
        yield from _jsonl(path)
    elif path.suffix == ".json":
        yield from _json(path)
    elif path.suffix == ".parquet":
        rows = enumerate(_read_parquet(path, key), start=1)
        yield from ((f"{path} row {number}", content) for number, content in rows)
    else:
        raise config_error(
            key, str(path), "unknown kind of file", f"use {DATA_FORMS}", source="data"
        )


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with open_file(path) as stream:
        for number in itertools.count(1):
            line = stream.readline(MAX_LINE_BYTES)
            if not line:
                break
            if len(line) == MAX_LINE_BYTES:
                raise InputError(f"line {number} has {MAX_LINE_BYTES} bytes or more")
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                content = parse_json(line)
            except ValueError as error:
                content = Unreadable(line, str(error).removeprefix("the text: "))
            yield f"{path} line {number}", content


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """Read a list of objects, a single object, or, as many .json files hold, one per line."""
    text = read_text(path).removeprefix("\ufeff")
    try:
        content = parse_json(text)
    except ValueError:
        if not text.lstrip().startswith("{"):
            raise
        yield from _jsonl(path)
        return
    if not isinstance(content, list):
        yield f"{path} line 1", content
        return
    # a second pass over the same text, only to find the line of each item
    find_end = json.JSONDecoder().raw_decode
    position, line = text.index("[") + 1, 1
    counted = 0
    for item in content:
        start = _end_of_gap(text, position)
        line += text.count("\n", counted, start)
        counted = start
        yield f"{path} line {line}", item
        position = find_end(text, start)[1]


def _end_of_gap(text: str, position: int) -> int:
    gap = _BETWEEN_ITEMS.match(text, position)
    assert gap is not None  # the pattern matches an empty text
    return gap.end()


def _read_parquet(path: Path, key: str) -> Iterator[dict[str, Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise config_error(
            key,
            str(path),
            "reading parquet needs the package pyarrow, which is not installed",
            'pip install "mppo[parquet]", or convert the file to jsonl',
            source="data",
        ) from error
    with open_file(path) as stream:
        try:
            limit = max(MIN_BYTES, MAX_RATIO * os.fstat(stream.fileno()).st_size)
            found = parquet.ParquetFile(stream)
            _check_metadata(found.metadata, limit)
            texts = [c.path for c in found.schema if c.physical_type == "BYTE_ARRAY"]
            table = parquet.ParquetFile(stream, read_dictionary=texts, metadata=found.metadata)
            total = 0
            # a batch over several groups would have several dictionaries for nested texts
            for group in range(found.metadata.num_row_groups):
                for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=[group]):
                    total += sum(map(_row_bytes, batch.columns))
                    if total > limit:
                        raise InputError(_too_large(total, limit))
                    yield from batch.to_pylist()
        except Exception as error:  # pyarrow raises many types for a damaged file
            why = f"not a usable parquet file: {error}"
            raise config_error(key, str(path), why, "write the file again", "data") from error


def _check_metadata(metadata: Any, limit: int) -> None:
    if metadata.num_rows > MAX_ROWS:
        raise InputError(f"it claims to have {metadata.num_rows} rows, more than {MAX_ROWS}")
    total = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            if column.num_values > MAX_VALUES:
                raise InputError(
                    f"{column.path_in_schema} claims to have {column.num_values} values in a row "
                    f"group, more than {MAX_VALUES}; write it with smaller row groups"
                )
            total += column.total_uncompressed_size
    if total > limit:
        raise InputError(_too_large(total, limit))


def _too_large(total: int, limit: int) -> str:
    return (
        f"its rows have {total} bytes or more, and the limit for a file of its size is {limit}; if "
        "they are meant, convert it to jsonl"
    )


def _row_bytes(array: Any) -> int:
    """Count the bytes of a column as rows: texts at full length wherever they occur."""
    pyarrow = importlib.import_module("pyarrow")
    compute = importlib.import_module("pyarrow.compute")
    types, kind = pyarrow.types, array.type
    own = _VALUE_BYTES * len(array)
    if types.is_dictionary(kind):
        lengths = compute.binary_length(array.dictionary)
        return own + (compute.sum(lengths.take(array.indices)).as_py() or 0)
    if types.is_struct(kind):
        return own + sum(map(_row_bytes, array.flatten()))
    if types.is_map(kind):
        return own + _row_bytes(array.keys) + _row_bytes(array.items)
    if types.is_nested(kind):
        return own + _row_bytes(array.flatten())
    if any(test(kind) for test in (types.is_string, types.is_binary, types.is_large_string,
                                   types.is_large_binary, types.is_fixed_size_binary)):  # fmt: skip
        return own + (compute.sum(compute.binary_length(array)).as_py() or 0)
    return own

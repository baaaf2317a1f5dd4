"""Records of jsonl, json and parquet files, with their places for messages."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.rules.files import DATA_FORMS
from mppo.data.parquet import read_parquet
from mppo.safety.input_error import InputError
from mppo.safety.input_files import open_file, parse_json, read_text

MAX_LINE_BYTES = 64 << 20
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
        rows = enumerate(read_parquet(path, key), start=1)
        yield from ((f"{path} row {number}", content) for number, content in rows)
    else:
        issue = ConfigIssue(key, str(path), "unknown kind of file", f"use {DATA_FORMS}")
        raise ConfigError([issue], source="data")


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

"""Rows of jsonl and parquet files, with the place of every fault."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mppo.config.errors import ConfigError, Fault
from mppo.config.input_files import open_file, parse_json

MAX_LINE_BYTES = 64 << 20
MAX_ROWS, ROWS_AT_ONCE = 100_000_000, 1024
"""Of a parquet file: a small one can say that a row stands in it a billion times."""
MAX_FAULTS = 10
"""Faulty rows told at once."""


@dataclass(frozen=True)
class Row:
    """One data row.

    Args:
        prompt: a text, or chat messages of ``role`` and ``content``.
        answer: the ground truth; what is no text is kept as JSON.
        data_source: the row's own ``data_source``, or the file's name without its ending.
        extra: the row's other columns.
        where: file and line, for messages.
    """

    prompt: str | list[dict[str, Any]]
    answer: str
    data_source: str
    extra: dict[str, Any] = field(default_factory=dict)
    where: str = ""


@dataclass(frozen=True)
class _Unreadable:
    """A line that could not be parsed, and why."""

    line: bytes
    why: str


class _BadRow(ValueError):
    """Why a row cannot be used."""


def read_rows(
    files: Sequence[str], key: str, prompt_key: str, answer_key: str, limit: int | None = None
) -> list[Row]:
    """Read files one after the other.

    Args:
        files: paths ending in .jsonl or .parquet.
        key: the recipe's key that names them, for messages.
        prompt_key, answer_key: columns; dots reach into nested objects
            (``reward_model.ground_truth``).
        limit: rows to read at most; None reads all.

    Raises:
        ConfigError: missing, empty or unreadable files and faulty rows, up to ``MAX_FAULTS``.
    """
    rows: list[Row] = []
    faults: list[Fault] = []
    for name in files:
        path = Path(name).expanduser()
        before, faults_before = len(rows), len(faults)
        try:
            for where, content in _records(path, key):
                if limit is not None and len(rows) >= limit:
                    break
                try:
                    rows.append(_row(content, path, where, prompt_key, answer_key))
                except _BadRow as error:
                    faults.append(Fault(where, _excerpt(content), str(error), _cure(key)))
                if len(faults) >= MAX_FAULTS:
                    raise ConfigError(faults, source="data")
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            why = "no such file" if isinstance(error, FileNotFoundError) else str(error)
            faults.append(Fault(key, name, why, "give the path of a readable file"))
            continue
        full = limit is not None and len(rows) >= limit
        if len(rows) == before and len(faults) == faults_before and not full:
            faults.append(Fault(key, name, "the file holds no row", "give a file with rows"))
    if faults:
        raise ConfigError(faults, source="data")
    return rows


def _records(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    """Place and content of each record."""
    if path.suffix in (".jsonl", ".ndjson"):
        yield from _jsonl(path)
    elif path.suffix == ".parquet":
        yield from _parquet(path, key)
    else:
        cure = "use .jsonl (one JSON object per line) or .parquet"
        raise ConfigError([Fault(key, str(path), "unknown kind of file", cure)], source="data")


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with open_file(path) as stream:
        for number in itertools.count(1):
            line = stream.readline(MAX_LINE_BYTES)
            if not line:
                break
            if len(line) == MAX_LINE_BYTES:
                raise ValueError(f"line {number} has {MAX_LINE_BYTES} bytes or more")
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                content = parse_json(line)
            except ValueError as error:
                content = _Unreadable(line, str(error).removeprefix("the text: "))
            yield f"{path} line {number}", content


def _parquet(path: Path, key: str) -> Iterable[tuple[str, Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        fault = Fault(
            key,
            str(path),
            "reading parquet needs the package pyarrow, which is not installed",
            'pip install "mppo[parquet]", or convert the file to jsonl',
        )
        raise ConfigError([fault], source="data") from error
    with open_file(path) as stream:
        try:
            table = parquet.ParquetFile(stream)
            if table.metadata.num_rows > MAX_ROWS:
                raise ValueError(f"it says that it has {table.metadata.num_rows} rows")
            batches = table.iter_batches(ROWS_AT_ONCE)
            contents = (content for batch in batches for content in batch.to_pylist())
            for number, content in enumerate(contents, start=1):
                yield f"{path} row {number}", content
        except Exception as error:  # whatever pyarrow makes of a damaged file
            why = f"no readable parquet file: {error}"
            raise ConfigError([Fault(key, str(path), why, "write it anew")], "data") from error


def _row(content: Any, path: Path, where: str, prompt_key: str, answer_key: str) -> Row:
    if isinstance(content, _Unreadable):
        raise _BadRow(f"not valid JSON: {content.why}")
    if not isinstance(content, dict):
        raise _BadRow(f"a JSON {type(content).__name__}, not an object")
    prompt = _lookup(content, prompt_key)
    answer = _lookup(content, answer_key)
    _check_prompt(prompt, prompt_key)
    if answer is None:
        raise _BadRow(f"{answer_key!r} is null")
    used = {prompt_key.partition(".")[0], answer_key.partition(".")[0], "data_source"}
    if "." in answer_key:
        used.discard(answer_key.partition(".")[0])
    return Row(
        prompt=prompt,
        answer=answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False),
        data_source=str(content.get("data_source") or path.stem),
        extra={name: value for name, value in content.items() if name not in used},
        where=where,
    )


def _lookup(content: dict[str, Any], key: str) -> Any:
    """Value under a key, dots reaching into nested objects where no such column exists."""
    if key in content:
        return content[key]
    value: Any = content
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise _BadRow(f"no key {key!r}; the row has {', '.join(map(repr, content)) or 'none'}")
        value = value[part]
    return value


def _check_prompt(prompt: Any, key: str) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise _BadRow(f"{key!r} is an empty text")
        return
    if not isinstance(prompt, list) or not prompt:
        raise _BadRow(f"{key!r} is neither a text nor a list of messages")
    for message in prompt:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise _BadRow(f"a message under {key!r} lacks 'role' or 'content'")


def _excerpt(content: Any) -> str:
    unread = isinstance(content, _Unreadable)
    text = content.line[:1000].decode(errors="replace") if unread else str(content)
    text = text.strip()
    return text if len(text) <= 60 else text[:57] + "..."


def _cure(key: str) -> str:
    return f"mend the row, or set data.prompt_key and data.answer_key to what {key} hold"

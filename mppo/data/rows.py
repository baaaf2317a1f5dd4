"""Rows of jsonl and parquet files; messages name the file and the line."""

from __future__ import annotations

import importlib
import itertools
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mppo.config.errors import ConfigError, ConfigIssue
from mppo.safety.input_files import open_file, parse_json

MAX_LINE_BYTES = 64 << 20
MAX_ROWS, ROWS_AT_ONCE = 100_000_000, 1024
"""Limits for parquet files: a small file can claim to hold a row a billion times."""
MAX_FAULTS, MAX_PLACES = 10, 5
"""Most causes in one message, and most rows named for each cause."""

DEFAULT_ANSWER, VERL_ANSWER = "answer", "reward_model.ground_truth"
"""The column of the answer, and the column of verl's rows."""


@dataclass(frozen=True)
class DataRow:
    """One data row.

    Args:
        prompt: a text, or chat messages with ``role`` and ``content``.
        answer: the ground truth; a value that is not a text becomes JSON.
        data_source: the row's ``data_source``, or the file's name without its suffix.
        extra: the row's other columns.
        where: file and line for messages.
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
    """A row that cannot be used; the message says why."""


def read_rows(
    files: Sequence[str], key: str, prompt_key: str, answer_key: str, limit: int | None = None
) -> list[DataRow]:
    """Read the rows of files, in the order of the files.

    Args:
        files: paths ending in .jsonl, .ndjson or .parquet.
        key: the recipe key that names the files, for messages.
        prompt_key, answer_key: columns; a dot selects a key of a nested object. The default answer
            column also finds verl's ``reward_model.ground_truth``.
        limit: most rows to read, as evenly from each file as possible; None reads all.

    Raises:
        ConfigError: missing, empty or unreadable files and bad rows: one issue per file and cause,
            up to ``MAX_FAULTS``.
    """
    # one row of each file in turn, so that a limit takes as many rows from each
    sources = [_Source(Path(name).expanduser(), key) for name in files]
    turns = deque(sources)
    taken = 0
    while turns and (limit is None or taken < limit):
        source = turns.popleft()
        if source.read_row(prompt_key, answer_key):
            taken += 1
            turns.append(source)
        if sum(len(source.causes) for source in sources) >= MAX_FAULTS:
            break
    issues = [issue for source in sources for issue in source.issues()]
    if issues:
        raise ConfigError(issues, source="data")
    return [row for source in sources for row in source.rows]


class _Source:
    """A file that is being read.

    Args:
        path: the file.
        key: the recipe key that names it.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self.rows: list[DataRow] = []
        self.causes: dict[str, list[tuple[str, Any]]] = {}
        """Why rows cannot be used; the places and contents of the rows by cause."""
        self._records = _records(path, key)
        self._ended = False

    def read_row(self, prompt_key: str, answer_key: str) -> bool:
        """Append the next usable row to ``rows``; return whether there was one."""
        try:
            for where, content in self._records:
                try:
                    self.rows.append(_row(content, self.path, where, prompt_key, answer_key))
                    return True
                except _BadRow as error:
                    self.causes.setdefault(str(error), []).append((where, content))
                if len(self.causes) >= MAX_FAULTS:
                    return False
        except FileNotFoundError:
            self.causes["no such file"] = []
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            self.causes[str(error)] = []
        self._ended = True
        return False

    def issues(self) -> Iterator[ConfigIssue]:
        """Yield an issue for the file, or one per cause for its rows."""
        for why, places in self.causes.items():
            if not places:
                yield ConfigIssue(self.key, str(self.path), why, "give the path of a readable file")
                continue
            where, content = places[0]
            yield ConfigIssue(where, _excerpt(content), why + self._further(places), _fix(self.key))
        if self._ended and not self.rows and not self.causes:
            why = "the file holds no rows"
            yield ConfigIssue(self.key, str(self.path), why, "give a file with rows")

    def _further(self, places: Sequence[tuple[str, Any]]) -> str:
        """Name further rows with the same cause, and count the rest."""
        if len(places) == 1:
            return ""
        named = [where.removeprefix(f"{self.path} ") for where, _ in places[1:MAX_PLACES]]
        rest = len(places) - 1 - len(named)
        return f" (as in {', '.join(named)}{f' and {rest} further rows' if rest else ''})"


def _records(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    """Yield place and content of each record."""
    if path.suffix in (".jsonl", ".ndjson"):
        yield from _jsonl(path)
    elif path.suffix == ".parquet":
        yield from _parquet(path, key)
    else:
        fix = "use .jsonl (one JSON object per line) or .parquet"
        raise ConfigError([ConfigIssue(key, str(path), "unknown kind of file", fix)], source="data")


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


def _parquet(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        issue = ConfigIssue(
            key,
            str(path),
            "reading parquet needs the package pyarrow, which is not installed",
            'pip install "mppo[parquet]", or convert the file to jsonl',
        )
        raise ConfigError([issue], source="data") from error
    with open_file(path) as stream:
        try:
            table = parquet.ParquetFile(stream)
            if table.metadata.num_rows > MAX_ROWS:
                raise ValueError(
                    f"it claims to have {table.metadata.num_rows} rows, more than {MAX_ROWS}"
                )
            batches = table.iter_batches(ROWS_AT_ONCE)
            contents = (content for batch in batches for content in batch.to_pylist())
            for number, content in enumerate(contents, start=1):
                yield f"{path} row {number}", content
        except Exception as error:  # pyarrow raises many types for a damaged file
            why = f"not a readable parquet file: {error}"
            raise ConfigError(
                [ConfigIssue(key, str(path), why, "write the file again")], "data"
            ) from error


def _row(content: Any, path: Path, where: str, prompt_key: str, answer_key: str) -> DataRow:
    if isinstance(content, _Unreadable):
        raise _BadRow(f"not valid JSON: {content.why}")
    if not isinstance(content, dict):
        raise _BadRow(f"a JSON {type(content).__name__}, not an object")
    if answer_key == DEFAULT_ANSWER and answer_key not in content and _has_verl_answer(content):
        answer_key = VERL_ANSWER
    prompt = _lookup(content, prompt_key)
    answer = _lookup(content, answer_key)
    _check_prompt(prompt, prompt_key)
    if answer is None:
        raise _BadRow(f"{answer_key!r} is null")
    # the columns used above; a column with a nested answer stays, its other keys may be useful
    used = {prompt_key.partition(".")[0], answer_key.partition(".")[0], "data_source"}
    if "." in answer_key:
        used.discard(answer_key.partition(".")[0])
    return DataRow(
        prompt=prompt,
        answer=answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False),
        data_source=str(content.get("data_source") or path.stem),
        extra={name: value for name, value in content.items() if name not in used},
        where=where,
    )


def _lookup(content: dict[str, Any], key: str) -> Any:
    """Return the value of a column, or of a key of a nested object if the key has dots."""
    if key in content:
        return content[key]
    value: Any = content
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            columns = ", ".join(map(repr, _names(content))) or "none"
            raise _BadRow(f"no key {key!r}; the row has {columns}")
        value = value[part]
    return value


def _has_verl_answer(content: dict[str, Any]) -> bool:
    """Whether a row has its answer in the column of verl's data preparation."""
    outer, _, inner = VERL_ANSWER.partition(".")
    return isinstance(content.get(outer), dict) and inner in content[outer]


def _names(content: dict[str, Any]) -> list[str]:
    """List a row's columns and those of nested objects, in the form of ``data.answer_key``."""
    return [
        name if inner is None else f"{name}.{inner}"
        for name, value in content.items()
        for inner in (value if isinstance(value, dict) and value else (None,))
    ]


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
    if isinstance(content, _Unreadable):
        content = content.line[:1000].decode(errors="replace")
    text = str(content).strip()
    return text if len(text) <= 60 else text[:57] + "..."


def _fix(key: str) -> str:
    return f"correct the row, or set data.prompt_key and data.answer_key to columns of {key}"

"""Rows of data files: their columns, and messages that name the file and the line."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mppo.data.records import Unreadable, read_records
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.safety.input_error import InputError

MAX_FAULTS, MAX_PLACES = 10, 5
"""Most causes in one message, and most rows named for each cause."""

PROMPT_COLUMNS = ("prompt", "messages", "input")
"""Columns that the default ``data.prompt_key`` finds: verl's and TRL's, TRL's conversations, and
OpenRLHF's."""
ANSWER_COLUMNS = ("answer", "reward_model.ground_truth", "label", "completion")
"""Columns that the default ``data.answer_key`` finds: mppo's, verl's, OpenRLHF's and TRL's."""
DEFAULT_ANSWER = ANSWER_COLUMNS[0]

HUB_FOLDER = "datasets--"
"""How the folder of a data set in the Hugging Face Hub's cache begins; its name follows."""

Convert = Callable[[dict[str, Any], Path, str], Any]
"""(content of a row, its file, its place) -> a value; raises ``BadRow``."""


@dataclass(frozen=True)
class DataRow:
    """One data row: the prompt, a text or chat messages; the ground truth, JSON if it is not a
    text; the row's ``data_source``, or the file's name without its suffix; file and line for
    messages."""

    prompt: str | list[dict[str, Any]]
    answer: str
    data_source: str
    extra: dict[str, Any] = field(default_factory=dict)
    where: str = ""


class BadRow(InputError):
    """A row that cannot be used; the message says why."""


def read_rows(
    files: Sequence[str],
    key: str,
    prompt_key: str,
    answer_key: str | None,
    limit: int | None = None,
    source: str | None = None,
) -> list[DataRow]:
    """Read the rows of .jsonl, .ndjson, .json or .parquet files, in the order of the files.

    Args:
        key: the recipe key that names the files, for messages.
        prompt_key, answer_key: columns; a dot selects a key of a nested object. The defaults
            also find the other ``PROMPT_COLUMNS`` and ``ANSWER_COLUMNS``. An ``answer_key`` of
            None gives empty answers.
        limit: most rows to read, as evenly from each file as possible.
        source: data source of rows without the column ``data_source``; None: the file's or data
            set's name.

    Raises:
        ConfigError: missing, empty or unreadable files and bad rows: one issue per file and
            cause, up to ``MAX_FAULTS``.
    """
    section = key.rpartition(".")[0]
    fix = f"correct the row, or set {section}.prompt_key and {section}.answer_key to columns of "
    convert = partial(_row, prompt_key=prompt_key, answer_key=answer_key, source=source)
    return read_converted(files, key, convert, fix + key, limit)


def too_few_prompts(batch_size: int, count: int, summary: str) -> ConfigIssue:
    """The issue of prompts that do not fill a batch."""
    why = f"a batch would repeat prompts: there are only {summary}"
    fix = f"give more prompts, or set it and ppo_mini_batch_size to at most {count}"
    return ConfigIssue("data.train_batch_size", batch_size, why, fix)


def read_converted(
    files: Sequence[str], key: str, convert: Convert, fix: str, limit: int | None = None
) -> list[Any]:
    """Read records as ``read_rows`` reads rows; ``convert`` makes a value of each, or raises
    ``BadRow``, about which ``fix`` says what to do."""
    # one row of each file in turn, so that a limit takes as many rows from each
    readers = [_Reader(Path(file).expanduser(), key, convert, fix) for file in files]
    turns = deque(readers)
    taken = 0
    while turns and (limit is None or taken < limit):
        reader = turns.popleft()
        if reader.read_row():
            taken += 1
            turns.append(reader)
        if sum(len(reader.causes) for reader in readers) >= MAX_FAULTS:
            break
    issues = [issue for reader in readers for issue in reader.issues()]
    if issues:
        raise ConfigError(issues, source="data")
    return [row for reader in readers for row in reader.rows]


class _Reader:
    def __init__(self, path: Path, key: str, convert: Convert, fix: str) -> None:
        self.path, self.key = path, key
        self.rows: list[Any] = []
        self.causes: dict[str, list[tuple[str, Any]]] = {}
        """Why rows cannot be used; the places and contents of the rows by cause."""
        self._convert, self._fix = convert, fix
        self._records = read_records(path, key)
        self._ended = False

    def read_row(self) -> bool:
        try:
            for where, content in self._records:
                try:
                    self.rows.append(self._convert(_object(content), self.path, where))
                    return True
                except BadRow as error:
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
            yield ConfigIssue(where, _excerpt(content), why + self._further(places), self._fix)
        if self._ended and not self.rows and not self.causes:
            why = "the file holds no rows"
            yield ConfigIssue(self.key, str(self.path), why, "give a file with rows")

    def _further(self, places: Sequence[tuple[str, Any]]) -> str:
        if len(places) == 1:
            return ""
        named = [where.removeprefix(f"{self.path} ") for where, _ in places[1:MAX_PLACES]]
        rest = len(places) - 1 - len(named)
        return f" (as in {', '.join(named)}{f' and {rest} further rows' if rest else ''})"


def _object(content: Any) -> dict[str, Any]:
    if isinstance(content, Unreadable):
        raise BadRow(f"not valid JSON: {content.why}")
    if not isinstance(content, dict):
        raise BadRow(f"a JSON {type(content).__name__}, not an object")
    return content


def _row(
    content: dict[str, Any],
    path: Path,
    where: str,
    prompt_key: str,
    answer_key: str | None,
    source: str | None,
) -> DataRow:
    prompt_key = _column(content, prompt_key, PROMPT_COLUMNS)
    prompt = look_up(content, prompt_key)
    check_prompt(prompt, prompt_key)
    prompt, reply = split_reply(prompt)
    used = {prompt_key.partition(".")[0], "data_source"}
    if answer_key is None:
        answer = ""
    else:
        answer_key = _column(content, answer_key, ANSWER_COLUMNS)
        from_reply = reply is not None and answer_key == DEFAULT_ANSWER not in content
        answer = reply if from_reply else look_up(content, answer_key)
        if answer is None:
            raise BadRow(f"{answer_key!r} is null")
        # a column with a nested answer stays: its other keys may be useful
        used.add(answer_key)
    return DataRow(
        prompt=prompt,
        answer=_answer_text(answer),
        data_source=str(content.get("data_source") or source or default_name(path)),
        extra={name: value for name, value in content.items() if name not in used},
        where=where,
    )


def default_name(path: Path) -> str:
    """Return the name of a file's data source: its data set on the Hub, or the file's stem."""
    for folder in path.parts:
        if folder.startswith(HUB_FOLDER):
            return folder.removeprefix(HUB_FOLDER).replace("--", "/")
    return path.stem


def _column(content: dict[str, Any], key: str, columns: Sequence[str]) -> str:
    """Return the column that ``key`` names: if it is the default, the first of ``columns`` that the
    row has."""
    if key != columns[0]:
        return key
    found = [name for name in columns if name in content or name in _names(content)]
    return found[0] if found else key


def look_up(content: dict[str, Any], key: str) -> Any:
    """The value of a column, or of a key of a nested object if the key has dots; else BadRow."""
    if key in content:
        return content[key]
    value: Any = content
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            columns = ", ".join(map(repr, _names(content))) or "none"
            raise BadRow(f"no key {key!r}; the row has {columns}")
        value = value[part]
    return value


def split_reply(prompt: Any) -> tuple[Any, Any]:
    """Split a conversation into the prompt and the content of its last message, if that is the
    assistant's; of another prompt, the second part is None."""
    if isinstance(prompt, list) and len(prompt) > 1 and prompt[-1]["role"] == "assistant":
        return prompt[:-1], prompt[-1]["content"]
    return prompt, None


def _answer_text(answer: Any) -> str:
    """Return an answer as text: of TRL's list with one message its content, else JSON."""
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], dict):
        answer = answer[0].get("content", answer)
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _names(content: dict[str, Any]) -> list[str]:
    """List a row's columns and those of nested objects, in the form of ``data.answer_key``."""
    return [
        name if inner is None else f"{name}.{inner}"
        for name, value in content.items()
        for inner in (value if isinstance(value, dict) and value else (None,))
    ]


def check_prompt(prompt: Any, key: str) -> None:
    """Raise BadRow unless a prompt is a text or a conversation."""
    if isinstance(prompt, str):
        if not prompt:
            raise BadRow(f"{key!r} is an empty text")
        return
    if not isinstance(prompt, list) or not prompt:
        raise BadRow(f"{key!r} is neither a text nor a list of messages")
    for message in prompt:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise BadRow(f"a message under {key!r} lacks 'role' or 'content'")


def _excerpt(content: Any) -> str:
    if isinstance(content, Unreadable):
        content = content.line[:1000].decode(errors="replace")
    text = str(content).strip()
    return text if len(text) <= 60 else text[:57] + "..."

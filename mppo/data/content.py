"""Digests of data rows: whether a resumed run has the rows that its checkpoint was trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mppo.data.rows import DataRow
from mppo.recipe.errors import ConfigError, ConfigIssue

ACCEPT = "trainer.on_changed_data"


@dataclass(frozen=True)
class Content:
    """The rows of one source, by the recipe key of its files or task: the key's value, and SHA-256
    of the rows in their order, as hexadecimal digits."""

    key: str
    given: Any = field(compare=False)
    digest: str


def content_of(key: str, given: Any, rows: Iterable[DataRow]) -> Content:
    """Digest the rows of a source in the order in which they were read, those that are too long
    included; the folder of a file has no influence."""
    digest = hashlib.sha256()
    encode = json.JSONEncoder(default=_described, skipkeys=True).encode
    for row in rows:
        # a text of JSON ends where its list ends, so rows cannot run into each other
        text = encode([row.prompt, row.answer, row.data_source, row.extra])
        digest.update(text.encode())
    return Content(key, given, digest.hexdigest())


def check_same_rows(contents: Sequence[Content], saved: Sequence[str]) -> None:
    """Compare the rows of a run with the digests in its checkpoint; ConfigError has an issue for
    each source whose rows differ."""
    issues = [
        ConfigIssue(
            content.key,
            content.given,
            "its rows are not those that the checkpoint was trained on (other rows, another order, "
            f"or an edited row): SHA-256 {content.digest[:12]} here, {before[:12]} there",
            "restore the data, or start a new run in another trainer.default_local_dir; to "
            f"continue at the same position of the changed data, set {ACCEPT}=accept",
        )
        for content, before in zip(contents, saved, strict=True)
        if content.digest != before
    ]
    if issues:
        raise ConfigError(issues, source="resume")


def _described(value: Any) -> Any:
    """Describe a value that JSON has no form for, the same in every process."""
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    named = type(value).__repr__ is not object.__repr__  # else its address would be in the text
    return repr(value) if named else type(value).__name__

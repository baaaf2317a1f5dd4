"""The dump of a step: ``RUN/rollouts/step_N``, for replay, ``mppo-inspect`` and the report.

A folder holds the files of ``experience_files``, for each rank the text of the tokens in its
sequences (``rank_R.json``), and ``step.json`` with a row per sequence. ``step.json`` is written
last: a folder without it is incomplete.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from mppo.dumps.stale import stale_reason, step_folders
from mppo.safety.disk import replace_text
from mppo.safety.foreign_text import json_line, quoted
from mppo.safety.input_error import InputError
from mppo.safety.input_files import read_json
from mppo.safety.redact import redact

FOLDER, HEADER = "rollouts", "step.json"
_FORMAT = 1
UNREADABLE = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError, RecursionError,
)  # fmt: skip
"""What reading a dump raises if another program wrote or changed it. The header and the types of
tensors are checked; sizes and numbers in tensors that contradict each other raise any of these."""

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class SequenceRow:
    """What a dump says of one sequence besides its tensors.

    Args:
        parts: (version of the weights, number of tokens) of the response's parts.
        baseline: score of a greedy response to the prompt; None without one.
        error: why the reward function failed; None: it did not.
        unscored: reason of a score of 0 (``mppo.rewards.scores.UNSCORED``); None: it was scored.
        token_total: sum of the rewards of its tokens, which are part of ``score``.
        right: whether the response is right; None if the reward does not say so.
        episode: place of the sequence's episode among the step's; None: each sequence is one.
    """

    __pydantic_config__: ClassVar = ConfigDict(strict=True, extra="forbid")

    uid: Whole
    data_source: str
    prompt: str
    ground_truth: str
    finish_reason: str
    parts: Annotated[Sequence[tuple[Whole, Count]], Field(min_length=1)]
    score: Finite
    baseline: Finite | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    unscored: str | None = None
    token_total: Finite = 0.0
    answer: str | None = None
    right: bool | None = None
    episode: Count | None = None


@dataclass(frozen=True)
class StepDump:
    """The header of a step's dump."""

    __pydantic_config__: ClassVar = ConfigDict(strict=True, extra="forbid")

    step: Count
    recipe: str
    ranks: Annotated[int, Field(ge=1, lt=2**20)]
    kl_coef: Finite
    rows: tuple[SequenceRow, ...]
    format: int = _FORMAT


_HEADER = TypeAdapter(StepDump)


def recipe_hash(recipe: Mapping[str, Any]) -> str:
    """SHA-256 of a recipe as plain values, without its secrets."""
    text = json.dumps(redact(dict(recipe)), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def step_folder(run: Path, step: int) -> Path:
    return run / FOLDER / f"step_{step}"


def write_header(folder: Path, header: StepDump) -> None:
    """Write ``step.json``, which completes the dump. Secrets in texts are replaced."""
    plain = redact(asdict(header))
    for row, own in zip(plain["rows"], header.rows, strict=True):
        row["numbers"] = dict(own.numbers)  # a number's name, such as pass, makes it no secret
    replace_text(folder / HEADER, json_line(plain) + "\n")


def read_header_of(folder: Path) -> StepDump:
    """Read ``step.json``; InputError if it is missing or belongs to another version of mppo, or
    with the name and value of an entry that is not valid."""
    path = folder / HEADER
    content = read_json(path, nan=True)
    if content.get("format") != _FORMAT:
        why = f"has format {content.get('format')}, not {_FORMAT}"
        raise InputError(f"{path}: {why}; dump the step with this version of mppo")
    try:
        return _HEADER.validate_json(json.dumps(content))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        value = quoted(repr(first["input"]))
        raise InputError(f"{path}: {where} = {value}: {first['msg']}") from error


def write_pieces(folder: Path, rank: int, pieces: Mapping[int, str]) -> None:
    """Write the text of each token that occurs in the sequences of a rank."""
    text = json_line({str(token): piece for token, piece in pieces.items()})
    replace_text(folder / f"rank_{rank}.json", text + "\n")


def read_pieces(folder: Path, ranks: int) -> dict[int, str]:
    """The text of the tokens of all ranks; InputError if a file is missing or not valid."""
    pieces: dict[int, str] = {}
    for rank in range(ranks):
        stored = read_json(folder / f"rank_{rank}.json")
        pieces.update({int(token): str(piece) for token, piece in stored.items()})
    return pieces


def dumped_steps(path: Path) -> dict[int, Path]:
    """The complete dumps by step, ascending, without those of lost work, of a run folder, its
    folder ``rollouts``, or the folder of one step."""
    found = _complete_dumps(path)
    return {step: folder for step, folder in found.items() if stale_reason(folder) is None}


def stale_dumps(path: Path) -> dict[int, tuple[Path, str]]:
    """The complete dumps of lost work by step, ascending, each with the reason; see
    ``dumped_steps``."""
    found = _complete_dumps(path)
    return {s: (folder, why) for s, folder in found.items() if (why := stale_reason(folder))}


def _complete_dumps(path: Path) -> dict[int, Path]:
    for parent in (path / FOLDER, path):
        steps = sorted(step_folders(parent).items())
        found = {step: folder for step, folder in steps if (folder / HEADER).is_file()}
        if found:
            return found
    match = re.fullmatch(r"step_([0-9]+)", path.resolve().name)
    return {int(match[1]): path} if match and (path / HEADER).is_file() else {}

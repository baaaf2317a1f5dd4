"""Known data sets in verl's schema, from the files in which their authors publish them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mppo.data.rows import BadRow, check_prompt, look_up, read_converted
from mppo.recipe.errors import config_error
from mppo.recipe.sections.data import DATA_ENDINGS, DATA_FORMS

SPLITS = {
    "train": "train", "training": "train", "test": "test", "validation": "validation",
    "valid": "validation", "val": "validation", "dev": "validation", "eval": "validation",
}  # fmt: skip
"""The split that a part of a file's name stands for."""
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
ASSISTANT = "\n\nAssistant:"
"""What ends the prompt in a conversation of hh-rlhf."""


@dataclass(frozen=True)
class PreparedRow:
    """A row before it gets its split and number. ``extra``: further keys of ``extra_info``;
    ``own``: keys that differ from the data set's (``style`` is that of ``reward_model``)."""

    prompt: list[dict[str, Any]]
    ground_truth: str
    extra: dict[str, Any] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishedDataSet:
    """A data set that ``prepare_rows`` reads.

    Args:
        convert: makes a row, or None for one that mppo cannot use; raises ``BadRow``.
        left_out: files whose name contains this are not read.
        why_left_out: what is special about rows for which ``convert`` returns None.
    """

    keys: dict[str, str]
    columns: str
    convert: Callable[[dict[str, Any]], PreparedRow | None]
    left_out: str | None = None
    why_left_out: str = ""


def prepare_rows(name: str, source: Path) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Read the files of a data set: rows in verl's schema by split, and remarks for the user.

    The folder ``source`` is searched with its subfolders. A file belongs to the split that its name
    or folder contains; if none contains one, all are training data.

    Raises:
        ConfigError: no files, or bad rows.
    """
    data_set = DATA_SETS[name]
    files = _files_by_split(source, data_set)
    fix = f"correct the row; {name} has {data_set.columns}"
    rows: dict[str, list[dict[str, Any]]] = {}
    left_out = 0
    for split, paths in files.items():
        found = read_converted(
            [str(path) for path in paths],
            "--from",
            lambda content, path, where: data_set.convert(content),
            fix,
        )
        usable = [row for row in found if row is not None]
        left_out += len(found) - len(usable)
        rows[split] = [
            _in_verls_schema(row, data_set.keys, split, index) for index, row in enumerate(usable)
        ]
    return rows, [f"left out {left_out} rows {data_set.why_left_out}"] if left_out else []


def _files_by_split(source: Path, data_set: PublishedDataSet) -> dict[str, list[Path]]:
    if not source.is_dir():
        fix = "give the folder with the downloaded files"
        raise config_error("--from", str(source), "no such folder", fix, source="prepare")
    files = [path for path in sorted(source.rglob("*")) if path.suffix in DATA_ENDINGS]
    if data_set.left_out:
        files = [f for f in files if data_set.left_out not in str(f.relative_to(source))]
    by_split: dict[str | None, list[Path]] = {}
    for path in files:
        parts = re.split(r"[/_.-]", str(path.relative_to(source)).lower())
        split = next((SPLITS[part] for part in reversed(parts) if part in SPLITS), None)
        by_split.setdefault(split, []).append(path)
    without = by_split.pop(None, [])
    named = {split: paths for split, paths in by_split.items() if split is not None}
    if not named and not without:
        fix = f"give a folder with files in the form {DATA_FORMS}; unpack .gz files"
        raise config_error("--from", str(source), "holds no data files", fix, source="prepare")
    return named or {"train": without}


def _in_verls_schema(
    row: PreparedRow, keys: dict[str, str], split: str, index: int
) -> dict[str, Any]:
    keys = {**keys, **row.own}
    return {
        "data_source": keys["data_source"],
        "prompt": row.prompt,
        "ability": keys["ability"],
        "reward_model": {"style": keys["style"], "ground_truth": row.ground_truth},
        "extra_info": {**row.extra, "split": split, "index": index},
    }


def _user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _text(content: dict[str, Any], key: str) -> str:
    value = look_up(content, key)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"{key!r} is not a text, or is empty")
    return value


def _gsm8k(content: dict[str, Any]) -> PreparedRow:
    question, answer = _text(content, "question"), _text(content, "answer")
    found = re.search(r"#### (-?[0-9.,]+)", answer)
    if found is None:
        raise BadRow("'answer' has no number after '#### '")
    return PreparedRow(
        _user(f"{question} {GSM8K_INSTRUCTION}"),
        found[1].replace(",", ""),
        {"answer": answer, "question": question},
    )


def _math(content: dict[str, Any]) -> PreparedRow:
    problem, solution = _text(content, "problem"), _text(content, "solution")
    answer = boxed_answer(solution)
    if answer is None:
        raise BadRow("'solution' has no \\boxed answer")
    extra = {key: str(content[key]) for key in ("level", "type") if content.get(key) is not None}
    return PreparedRow(_user(f"{problem} {MATH_INSTRUCTION}"), answer, extra)


def boxed_answer(solution: str) -> str | None:
    """The last boxed answer of a solution of MATH, as verl finds it: in ``\\boxed{...}``,
    ``\\fbox{...}`` or ``\\boxed X$``; None without one."""
    if "\\boxed " in solution:
        return solution.rpartition("\\boxed ")[2].split("$")[0]
    start = solution.rfind("\\boxed")
    start = start if start >= 0 else solution.rfind("\\fbox")
    opening = solution.find("{", start) if start >= 0 else -1
    if opening < 0:
        return None
    depth = 0
    for match in re.compile(r"[{}]").finditer(solution, opening):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return solution[opening + 1 : match.start()]
    return None


def _full_hh_rlhf(content: dict[str, Any]) -> PreparedRow:
    """Read a row with ``prompt``, or with conversations that differ in their last answer."""
    if "prompt" in content:
        reply = "response" if "response" in content else "chosen"
        return PreparedRow(_user(_text(content, "prompt")), _text(content, reply))
    conversation = _text(content, "chosen")
    prompt, separator, response = conversation.rpartition(ASSISTANT)
    if not separator or not prompt.strip():
        raise BadRow(f"'chosen' has no question before {ASSISTANT.strip()!r}")
    return PreparedRow(_user(prompt + separator), response)


def _tldr(content: dict[str, Any]) -> PreparedRow:
    label = "completion" if "label" not in content and "completion" in content else "label"
    return PreparedRow(_user(_text(content, "prompt")), _text(content, label))


def _eurus(content: dict[str, Any]) -> PreparedRow | None:
    """Read a row that is in verl's schema; a program's tests are lists of inputs and outputs."""
    prompt, truth = look_up(content, "prompt"), _text(content, "reward_model.ground_truth")
    check_prompt(prompt, "prompt")
    ability, style = _text(content, "ability"), _text(content, "reward_model.style")
    if isinstance(prompt, str):
        prompt = _user(prompt)
    if ability == "code":
        try:
            tests = json.loads(truth)
        except ValueError as error:
            raise BadRow("'reward_model.ground_truth' of a program is not JSON") from error
        if isinstance(tests, dict) and tests.get("fn_name"):
            return None
    own = {"data_source": _text(content, "data_source"), "ability": ability, "style": style}
    return PreparedRow(prompt, truth, own=own)


DATA_SETS: dict[str, PublishedDataSet] = {
    "gsm8k": PublishedDataSet(
        {"data_source": "openai/gsm8k", "ability": "math", "style": "rule"},
        "question, and answer with its result after '####'",
        _gsm8k,
        left_out="socratic",
    ),
    "math": PublishedDataSet(
        {"data_source": "DigitalLearningGmbH/MATH-lighteval", "ability": "math", "style": "rule"},
        "problem, level, type, and solution with its result in \\boxed{}",
        _math,
    ),
    "full_hh_rlhf": PublishedDataSet(
        {"data_source": "Dahoas/full-hh-rlhf", "ability": "alignment", "style": "model"},
        "prompt, response, chosen and rejected, or chosen and rejected conversations",
        _full_hh_rlhf,
    ),
    "tldr": PublishedDataSet(
        {
            "data_source": "CarperAI/openai_summarize_tldr",
            "ability": "summarization",
            "style": "model",
        },
        "prompt, and label or completion",
        _tldr,
    ),
    "eurus": PublishedDataSet(
        {},
        "data_source, prompt, ability, reward_model and extra_info",
        _eurus,
        why_left_out="whose tests call a function (fn_name): programs are tested by their output",
    ),
}
"""The data sets by name; the keys, instructions and answers are those of verl's scripts."""

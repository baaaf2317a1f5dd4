"""Prompts of a run, from a procedural task or from jsonl and parquet files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mppo.batch import Prompt
from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.sections.data import DataConfig
from mppo.data import tasks
from mppo.data.chat_template import render_with
from mppo.data.rows import DataRow, read_rows

TASK_SIZES: dict[tasks.Split, int] = {"train": 4096, "val": 64}
"""Number of prompts of a task if ``data.train_size`` or ``data.val_size`` is null."""


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one split.

    Args:
        prompts: N prompts; ``uid`` is the index in this tuple.
        filtered: number of rows left out because they exceed ``data.max_prompt_length``.
        truncated: number of prompts cut to that length.
    """

    prompts: tuple[Prompt, ...]
    filtered: int = 0
    truncated: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    def summary(self) -> str:
        """Count the prompts of each source, and those left out or truncated."""
        sources = Counter(prompt.data_source for prompt in self.prompts)
        by_source = ", ".join(f"{name} {count}" for name, count in sources.items())
        changed = {"left out as too long": self.filtered, "truncated": self.truncated}
        counts = [f"{count} {how}" for how, count in changed.items() if count]
        return ", ".join([f"{len(self)} ({by_source})" if by_source else "0", *counts])


def load_prompts(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, split: tasks.Split
) -> PromptSet:
    """Read, render, tokenise and filter the prompts of one split.

    Args:
        data: the recipe's section.
        tokenizer: has a chat template if ``data.apply_chat_template`` is set.
        split: ``"train"`` or ``"val"``. Without ``data.val_files`` or a task, or with
            ``data.val_size`` 0, the validation split is empty.

    Returns:
        The prompts in the order of the files or the task; ``PromptLoader`` shuffles them.

    Raises:
        ConfigError: no source or two, a bad file or row, a chat template that fails or exceeds its
            limits, or no prompt that is short enough.
    """
    if bool(data.task) == bool(data.train_files):
        found = "both" if data.task else "neither"
        fix = "set exactly one of data.task and data.train_files"
        raise ConfigError([ConfigIssue("data.task", data.task, f"{found} given", fix)])
    rows = _task_rows(data, split) if data.task else _file_rows(data, split)
    if not rows:
        return PromptSet(())
    texts = _render(data, tokenizer, rows)
    special = not data.apply_chat_template  # a chat template writes its own special tokens
    token_ids = tokenizer(texts, add_special_tokens=special)["input_ids"]
    return _fit(data, rows, texts, token_ids)


def _task_rows(data: DataConfig, split: tasks.Split) -> list[DataRow]:
    assert data.task
    kwargs = dict(data.task_kwargs)
    template = kwargs.pop("template", "{question}")
    if not isinstance(template, str) or "{question}" not in template:
        fix = "give a text that contains {question}"
        raise ConfigError(
            [ConfigIssue("data.task_kwargs.template", template, "has no {question}", fix)]
        )
    source = tasks.task(data.task, **{"seed": data.seed, **kwargs})
    size = data.val_size if split == "val" else data.train_size
    count = TASK_SIZES[split] if size is None else size
    return [
        DataRow(
            prompt=template.replace("{question}", example.prompt),
            answer=example.answer,
            data_source=data.task,
            extra=example.extra,
            where=f"data.task={data.task}, example {index}",
        )
        for index, example in enumerate(tasks.split_examples(source, split, count))
    ]


def _file_rows(data: DataConfig, split: tasks.Split) -> list[DataRow]:
    files, limit = data.train_files, data.train_size
    if split == "val":
        files, limit = data.val_files, data.val_size
    key = f"data.{split}_files"
    return read_rows(files, key, data.prompt_key, data.answer_key, limit)


def _render(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, rows: Sequence[DataRow]
) -> list[str]:
    """Return the text of each row as the model gets it."""
    if not data.apply_chat_template:
        return _render_plain(data, rows)
    conversations = [_conversation(data, row) for row in rows]
    return render_with(tokenizer, conversations, "data.apply_chat_template")


def _render_plain(data: DataConfig, rows: Sequence[DataRow]) -> list[str]:
    issues = []
    if data.system_prompt:
        why = "a system prompt needs a chat template"
        fix = "remove it, or set data.apply_chat_template=true"
        issues.append(ConfigIssue("data.system_prompt", data.system_prompt, why, fix))
    conversation = next((row for row in rows if not isinstance(row.prompt, str)), None)
    if conversation is not None:
        why = f"{conversation.where} holds a list of messages, which needs a chat template"
        issues.append(ConfigIssue("data.apply_chat_template", False, why, "set it to true"))
    if issues:
        raise ConfigError(issues)
    return [str(row.prompt) for row in rows]


def _conversation(data: DataConfig, row: DataRow) -> tuple[dict[str, Any], ...]:
    """The messages of a row's prompt, the system prompt first."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    own = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    return (*system, *own)


def _fit(
    data: DataConfig, rows: Sequence[DataRow], texts: Sequence[str], token_ids: Sequence[list[int]]
) -> PromptSet:
    """Leave out or cut prompts that are longer than ``data.max_prompt_length``."""
    limit = data.max_prompt_length
    kept: list[Prompt] = []
    filtered = truncated = 0
    for row, text, ids in zip(rows, texts, token_ids):
        if len(ids) > limit and data.filter_overlong_prompts:
            filtered += 1
            continue
        if len(ids) > limit:
            ids = _truncate(ids, limit, data.truncation, row.where)
            truncated += 1
        kept.append(
            Prompt(
                uid=len(kept),
                token_ids=torch.tensor(ids, dtype=torch.int32),
                data_source=row.data_source,
                ground_truth=row.answer,
                text=text,
                extra=row.extra,
                messages=_conversation(data, row) if data.apply_chat_template else (),
            )
        )
    if not kept:
        shortest = min(len(ids) for ids in token_ids)
        why = f"all {len(rows)} prompts are longer: the shortest has {shortest} tokens"
        fix = f"raise it to at least {shortest}, or set data.filter_overlong_prompts=false"
        raise ConfigError([ConfigIssue("data.max_prompt_length", limit, why, fix)])
    return PromptSet(tuple(kept), filtered, truncated)


def _truncate(ids: list[int], limit: int, side: str, where: str) -> list[int]:
    """Cut a prompt to ``limit`` tokens at the ``left``, ``right`` or ``middle``."""
    if side == "error":
        issue = ConfigIssue(
            "data.max_prompt_length",
            limit,
            f"{where} has {len(ids)} tokens",
            "raise it, set data.filter_overlong_prompts=true, or set data.truncation to "
            "left, right or middle",
        )
        raise ConfigError([issue])
    if side == "left":
        return ids[len(ids) - limit :]
    if side == "right":
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]

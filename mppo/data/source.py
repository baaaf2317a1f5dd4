"""Prompts of a run, from procedural tasks or from files, of one source or of several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mppo.batch.prompt import Prompt
from mppo.data import tasks
from mppo.data.chat_template import render_with
from mppo.data.content import Content, content_of
from mppo.data.rows import DataRow, read_rows
from mppo.data.verifiers_environment import TASK, environment_rows
from mppo.hub.tokenizing import tokens_of
from mppo.recipe.errors import ConfigError, ConfigIssue, config_error
from mppo.recipe.sections.data import DataConfig, SourceConfig

TASK_SIZES: dict[tasks.Split, int] = {"train": 4096, "val": 64}
"""Number of prompts of a task if ``data.train_size`` or ``data.val_size`` is null."""


@dataclass(frozen=True)
class SourceShare:
    """Consecutive prompts of one source, at least one, and their weight relative to the others' in
    the training data."""

    count: int
    weight: float


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one split.

    Args:
        prompts: N prompts; ``uid`` is the index in this tuple.
        shares: the sources, in the order of the prompts, if they are mixed by weight. Empty: every
            prompt has the same weight.
    """

    prompts: tuple[Prompt, ...]
    filtered: int = 0
    truncated: int = 0
    shares: tuple[SourceShare, ...] = ()
    contents: tuple[Content, ...] = ()

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
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: tasks.Split,
    tools: Sequence[Mapping[str, Any]] = (),
) -> PromptSet:
    """Read, render, tokenise and filter the prompts of one split, in the order of the sources and
    their files or tasks; ``PromptLoader`` shuffles and mixes them.

    Without ``data.val_files`` or a task, or with ``data.val_size`` 0, the validation split is
    empty. The chat template writes the schemas of ``tools`` into every prompt.

    Raises:
        ConfigError: a source without task or files or with both, a bad file or row, a chat
            template that fails or exceeds its limits, or no prompt that is short enough.
    """
    sources = data.prompt_sources
    parts = [
        _load_source(data, key, each, tokenizer, split, tools) for key, each in sources.items()
    ]
    prompts = (prompt for part in parts for prompt in part.prompts)
    shares = tuple(
        SourceShare(len(part), each.weight) for part, each in zip(parts, sources.values())
    )
    return PromptSet(
        prompts=tuple(replace(prompt, uid=uid) for uid, prompt in enumerate(prompts)),
        filtered=sum(part.filtered for part in parts),
        truncated=sum(part.truncated for part in parts),
        shares=shares if data.sources and split == "train" else (),
        contents=tuple(content for part in parts for content in part.contents),
    )


def _load_source(
    data: DataConfig,
    key: str,
    source: SourceConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: tasks.Split,
    tools: Sequence[Mapping[str, Any]],
) -> PromptSet:
    if bool(source.task) == bool(source.train_files):
        found = "both" if source.task else "neither"
        fix = f"set exactly one of {key}.task and {key}.train_files"
        raise config_error(f"{key}.task", source.task, f"{found} given", fix)
    read = _task_rows if source.task else _file_rows
    read = _environment_rows if (source.task or "").startswith(TASK) else read
    rows = read(key, source, split, data.seed)
    if not rows:
        return PromptSet(())
    if data.apply_chat_template:
        conversations = [_conversation(source, row) for row in rows]
        texts = render_with(tokenizer, conversations, "data.apply_chat_template", tools=tools)
    else:
        texts = _plain_texts(key, source, rows)
    special = not data.apply_chat_template  # a chat template writes its own special tokens
    token_ids = tokens_of(tokenizer, texts, special)
    found = _fit(data, source, rows, texts, token_ids)
    if split == "val":
        return found
    name = f"{key}.task" if source.task else f"{key}.train_files"
    given = source.task or list(source.train_files)
    return replace(found, contents=(content_of(name, given, rows),))


def _task_rows(key: str, source: SourceConfig, split: tasks.Split, seed: int) -> list[DataRow]:
    assert source.task
    kwargs = dict(source.task_kwargs)
    template = kwargs.pop("template", "{question}")
    if not isinstance(template, str) or "{question}" not in template:
        fix = "give a text that contains {question}"
        raise config_error(f"{key}.task_kwargs.template", template, "has no {question}", fix)
    task = tasks.task(source.task, **{"seed": seed, **kwargs})
    size = source.val_size if split == "val" else source.train_size
    count = TASK_SIZES[split] if size is None else size
    return [
        DataRow(
            prompt=template.replace("{question}", example.prompt),
            answer=example.answer,
            data_source=source.name or source.task,
            extra=example.extra,
            where=f"{key}.task={source.task}, example {index}",
        )
        for index, example in enumerate(tasks.split_examples(task, split, count))
    ]


def _environment_rows(
    key: str, source: SourceConfig, split: tasks.Split, seed: int
) -> list[DataRow]:
    name = str(source.task).removeprefix(TASK)
    size = source.val_size if split == "val" else source.train_size
    return environment_rows(name, source.task_kwargs, split, size)


def _file_rows(key: str, source: SourceConfig, split: tasks.Split, seed: int) -> list[DataRow]:
    files, limit = source.train_files, source.train_size
    if split == "val":
        files, limit = source.val_files, source.val_size
    assert source.prompt_key is not None
    files_key = f"{key}.{split}_files"
    return read_rows(files, files_key, source.prompt_key, source.answer_key, limit, source.name)


def _plain_texts(key: str, source: SourceConfig, rows: Sequence[DataRow]) -> list[str]:
    issues = []
    if source.system_prompt:
        why = "a system prompt needs a chat template"
        fix = "remove it, or set data.apply_chat_template=true"
        issues.append(ConfigIssue(f"{key}.system_prompt", source.system_prompt, why, fix))
    conversation = next((row for row in rows if not isinstance(row.prompt, str)), None)
    if conversation is not None:
        why = f"{conversation.where} holds a list of messages, which needs a chat template"
        issues.append(ConfigIssue("data.apply_chat_template", False, why, "set it to true"))
    if issues:
        raise ConfigError(issues)
    return [str(row.prompt) for row in rows]


def _conversation(source: SourceConfig, row: DataRow) -> tuple[dict[str, Any], ...]:
    system = [{"role": "system", "content": source.system_prompt}] if source.system_prompt else []
    own = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    return (*system, *own)


def _fit(
    data: DataConfig,
    source: SourceConfig,
    rows: Sequence[DataRow],
    texts: Sequence[str],
    token_ids: Sequence[list[int]],
) -> PromptSet:
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
                verifier=source.verifier,
                messages=_conversation(source, row) if data.apply_chat_template else (),
            )
        )
    if not kept:
        shortest = min(len(ids) for ids in token_ids)
        why = f"all {len(rows)} prompts are longer: the shortest has {shortest} tokens"
        fix = f"raise it to at least {shortest}, or set data.filter_overlong_prompts=false"
        raise config_error("data.max_prompt_length", limit, why, fix)
    return PromptSet(tuple(kept), filtered, truncated)


def _truncate(ids: list[int], limit: int, side: str, where: str) -> list[int]:
    if side == "error":
        raise config_error(
            "data.max_prompt_length",
            limit,
            f"{where} has {len(ids)} tokens",
            "raise it, set data.filter_overlong_prompts=true, or set data.truncation to "
            "left, right or middle",
        )
    if side == "left":
        return ids[len(ids) - limit :]
    if side == "right":
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]

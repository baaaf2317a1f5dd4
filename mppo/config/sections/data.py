"""The recipe's ``data`` section: prompts and plain text."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mppo.config.sections.section import Section


class DataConfig(Section):
    """Prompts from a procedural task or from files, and plain text for the pretraining mix.

    Exactly one of ``task`` and ``train_files`` is set.
    """

    train_files: tuple[str, ...] = ()
    """Files of training prompts, .jsonl or .parquet."""
    val_files: tuple[str, ...] = ()
    """Files of validation prompts, .jsonl or .parquet. Empty: no validation, unless ``task`` is
    set."""
    task: str | None = None
    """Procedural task that generates prompts and answers, such as ``arithmetic`` or
    ``reasoning_gym:chain_sum``."""
    task_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of the task, such as ``max_operand``, ``seed`` or ``template``."""
    train_size: int | None = Field(default=None, gt=0)
    """Largest number of training prompts, taken in equal parts from several files. null: every row
    of the files, or 4096 prompts of a task."""
    val_size: int | None = Field(default=None, ge=0)
    """Largest number of validation prompts, taken in equal parts from several files. null: every
    row of the files, or 64 prompts of a task. 0: no validation."""
    prompt_key: str = "prompt"
    """Column of the prompt: a text or a list of chat messages. Dots reach into nested objects."""
    answer_key: str = "answer"
    """Column of the ground truth. Dots reach into nested objects."""
    max_prompt_length: int = Field(default=512, gt=0)
    """Longest prompt in tokens, chat template included."""
    max_response_length: int = Field(default=512, gt=0)
    """Longest response in tokens; generation stops there."""
    train_batch_size: int = Field(default=64, gt=0)
    """Prompts per PPO step; each has ``rollout.n`` responses."""
    val_batch_size: int | None = Field(default=None, gt=0)
    """Validation prompts per generation request. null: all of them at once."""
    filter_overlong_prompts: bool = True
    """Leave out prompts longer than ``max_prompt_length``. false: apply ``truncation``."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """Where a prompt that is too long is cut: at its beginning (left), end (right) or middle.
    ``error``: stop the run."""
    apply_chat_template: bool = True
    """Render prompts with the tokenizer's chat template. false: use their text as it is."""
    system_prompt: str | None = None
    """System message in front of every prompt. null: none."""
    shuffle: bool = True
    """Shuffle prompts in every epoch; the order follows from ``seed`` and the epoch."""
    seed: int = 0
    """Seed of the order of prompts and of the prompts of a task."""
    ptx_files: tuple[str, ...] = ()
    """Files of plain text for the language-model loss of ``actor.ptx_coef``, one document per
    row."""
    ptx_key: str = "text"
    """Column of the text in ``ptx_files``."""
    ptx_batch_size: int | None = Field(default=None, gt=0)
    """Documents per optimizer step of the actor. null: as many as its mini-batch has sequences."""

"""The recipe's ``data`` section: prompts and plain text."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mppo.recipe.sections.section import Section

DATA_ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet")
DATA_FORMS = ".jsonl (a JSON object per line), .json (a list of objects) or .parquet"


class SourceConfig(Section):
    """One of several sources of prompts that are mixed.

    Exactly one of ``task`` and ``train_files`` is set. Keys that are null take the value of the key
    of the same name in ``data``.
    """

    weight: float = Field(default=1.0, gt=0)
    """Share of this source in the training prompts, relative to the other weights. A source is
    repeated when its prompts are used up."""
    name: str | None = None
    """Data source of rows without a column ``data_source``; selects the verifier and names the
    metrics. null: the file's or data set's name."""
    train_files: tuple[str, ...] = ()
    """As ``data.train_files``."""
    val_files: tuple[str, ...] = ()
    """As ``data.val_files``."""
    task: str | None = None
    """As ``data.task``."""
    task_kwargs: dict[str, Any] = Field(default_factory=dict)
    """As ``data.task_kwargs``."""
    train_size: int | None = Field(default=None, gt=0)
    """Largest number of training prompts of this source."""
    val_size: int | None = Field(default=None, ge=0)
    """Largest number of validation prompts of this source."""
    prompt_key: str | None = None
    """Column of the prompt."""
    answer_key: str | None = None
    """Column of the ground truth."""
    system_prompt: str | None = None
    """System message in front of every prompt of this source."""
    verifier: str | None = None
    """Verifier of ``reward.name: rule`` for this source. null: ``reward.verifier``, or the verifier
    of the data source."""


class DataConfig(Section):
    """Prompts from a procedural task or from files, and plain text for the pretraining mix.

    Exactly one of ``task``, ``train_files`` and ``sources`` is set.
    """

    train_files: tuple[str, ...] = ()
    """Files of training prompts, .jsonl, .json or .parquet; or data sets of the Hugging Face Hub,
    ``hf:OWNER/NAME``, ``hf:OWNER/NAME:SPLIT`` or ``hf:OWNER/NAME/CONFIG:SPLIT``, which are
    downloaded into its cache. The split is ``train`` if none is given."""
    val_files: tuple[str, ...] = ()
    """Files or data sets of validation prompts, as in ``train_files``; the split is ``test`` if
    none is given. Empty: no validation, unless ``task`` is set."""
    sources: tuple[SourceConfig, ...] = ()
    """Several sources, mixed by weight, each with its own files, system prompt and verifier."""
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
    """Column of the prompt: a text or a list of chat messages. Dots reach into nested objects. The
    default also finds ``messages`` (TRL) and ``input`` (OpenRLHF)."""
    answer_key: str | None = "answer"
    """Column of the ground truth. Dots reach into nested objects. The default also finds
    ``reward_model.ground_truth`` (verl), ``label`` (OpenRLHF) and ``completion`` (TRL). null: rows
    have no ground truth, as for a reward model."""
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
    """Files, or data sets as in ``train_files``, of plain text for the language-model loss of
    ``actor.ptx_coef``, one document per row."""
    ptx_key: str = "text"
    """Column of the text in ``ptx_files``."""
    ptx_batch_size: int | None = Field(default=None, gt=0)
    """Documents per optimizer step of the actor. null: as many as its mini-batch has sequences."""

    @property
    def prompt_sources(self) -> dict[str, SourceConfig]:
        """The sources of prompts by the key of their section, with ``data``'s values for null keys.

        Without ``sources``, this section is the only one.
        """
        if not self.sources:
            own = {name: getattr(self, name) for name in _SHARED}
            return {"data": SourceConfig(**own)}
        return {
            f"data.sources.{index}": self._filled(source)
            for index, source in enumerate(self.sources)
        }

    @property
    def files(self) -> dict[str, tuple[str, ...]]:
        """The data files by key."""
        files = {"data.ptx_files": self.ptx_files}
        for key, source in self.prompt_sources.items():
            files[f"{key}.train_files"] = source.train_files
            files[f"{key}.val_files"] = source.val_files
        return files

    def _filled(self, source: SourceConfig) -> SourceConfig:
        names = _SHARED - {"task"}  # a source without a task has files
        missing = {name: getattr(self, name) for name in names if getattr(source, name) is None}
        return source.model_copy(update=missing)


_SHARED = SourceConfig.model_fields.keys() & DataConfig.model_fields.keys()
"""Keys that a source has in common with the section."""

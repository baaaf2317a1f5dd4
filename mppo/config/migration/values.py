"""Conversions of values that the tables share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mppo.config.migration.row import Setting

DATA_ENDINGS = (".jsonl", ".ndjson", ".parquet", ".json")


def both(key: str) -> tuple[str, str]:
    """The key of the actor and that of the critic."""
    return f"actor.{key}", f"critic.{key}"


def dtype(value: Any) -> Any:
    """``model.dtype`` for a name of a precision."""
    return {"bf16": "bfloat16", "fp16": "bfloat16", "fp32": "float32"}.get(str(value), value)


def decay(value: Any) -> Any:
    """``lr_decay_style`` for a name of a schedule of transformers."""
    names = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
    return names.get(str(value), value)


def trackers(value: Any) -> Any:
    """``trainer.logger`` for one or several names of trackers."""
    names = value if isinstance(value, list) else [value]
    known = [name for name in names if name in ("wandb", "tensorboard", "mlflow", "swanlab")]
    known = ["wandb", "tensorboard"] if names == ["all"] else known
    return ["console", "jsonl", *known]


def pair(value: Any) -> Any:
    """Two numbers given one after the other."""
    return list(value) if isinstance(value, list) else value


def data_set_files(key: str, names: Any, origin: str) -> Iterator[Setting]:
    """A setting of files of prompts; a data set of the hub becomes a file to be written.

    Args:
        key: ``data.train_files`` or ``data.val_files``.
        names: one or several, in a list or divided by commas.
        origin: the flag.
    """
    parts = names if isinstance(names, list) else str(names).split(",")
    files, missing = [], []
    for part in (str(part).strip() for part in parts):
        if part.lower().endswith(DATA_ENDINGS) or part.startswith(("$", "/", "~")):
            files.append(part)
        elif part:
            files.append(f"{part.strip('/').rpartition('/')[2]}.jsonl")
            missing.append(part)
    if missing:
        origin += f"; write {', '.join(missing)} to this file"
    yield Setting(key, files, origin)

"""Conversions of values that the tables share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mppo.recipe.data_set_name import PREFIX, is_data_set_name
from mppo.recipe.sections.data import DATA_ENDINGS
from mppo_migrate.row import Flags, Setting


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


def given(flags: Flags, *names: str) -> str:
    """Those of the flags that the command has, for the comment beside what they become."""
    return ", ".join(f"--{name}" for name in names if flags.get(name) is not None)


def data_set_files(
    key: str, names: Any, origin: str, config: Any = None, split: Any = None
) -> Iterator[Setting]:
    """A setting of files of prompts, with the names of data sets on the Hugging Face Hub.

    Args:
        key: ``data.train_files``, ``data.val_files`` or ``data.ptx_files``.
        names: one or several, in a list or divided by commas.
        origin: the flag.
        config, split: of the data sets; None: the default ones.
    """
    files, missing = [], []
    for part in _parts(names):
        files.append(_data_file(part, config, split, missing))
    if missing:
        origin += f"; write {', '.join(missing)} to this file"
    yield Setting(key, files, origin)


def mixed_data_sets(names: Any, weights: Any, origin: str) -> Iterator[Setting]:
    """The settings of data sets that are mixed by weight, or of one data set without a weight.

    Args:
        names, weights: divided by commas, in the same order.
        origin: the flags.
    """
    parts, numbers = _parts(names), [_number(part) for part in _parts(weights)]
    if len(parts) == 1 or len(numbers) != len(parts) or None in numbers:
        yield from data_set_files("data.train_files", names, origin)
        return
    missing: list[str] = []
    sources = [
        {"train_files": [_data_file(part, None, None, missing)], "weight": number}
        for part, number in zip(parts, numbers)
    ]
    if missing:
        origin += f"; write {', '.join(missing)} to these files"
    yield Setting("data.sources", sources, origin)


def _data_file(name: str, config: Any, split: Any, missing: list[str]) -> str:
    """A file, or a data set of the Hub. A name that is neither becomes a file that the user writes;
    it is added to ``missing``."""
    if name.lower().endswith(DATA_ENDINGS) or name.startswith(("$", "/", "~", "./")):
        return name
    own = f"/{config}" if config else ""
    part = f":{split}" if split else ""
    if is_data_set_name(f"{PREFIX}{name}{own}{part}"):
        return f"{PREFIX}{name}{own}{part}"
    missing.append(name)
    return f"{name.strip('/').rpartition('/')[2]}.jsonl"


def _parts(names: Any) -> list[str]:
    """Names in a list or divided by commas, one by one."""
    parts = names if isinstance(names, list) else str(names).split(",")
    return [part for part in (str(part).strip() for part in parts) if part]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

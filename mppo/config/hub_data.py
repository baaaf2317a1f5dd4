"""Replacement of the data sets that a recipe names by their local files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mppo.config.data_set_name import DataSetName, is_data_set, parse_data_set
from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.schema import Recipe

FetchDataSet = Callable[[DataSetName], Sequence[Path]]
"""From a data set to its local files, downloaded if they are not there; raises ConfigError."""

DEFAULT_SPLITS = {"train_files": "train", "val_files": "test", "ptx_files": "train"}
"""The split of a data set without one, by key."""


def with_local_files(recipe: Recipe, fetch: FetchDataSet) -> tuple[Recipe, list[ConfigIssue]]:
    """The recipe with local files for data sets of the Hub, and the issues of failed downloads."""
    issues: list[ConfigIssue] = []

    def local(key: str, section: Any) -> dict[str, tuple[str, ...]]:
        """The lists of files of a section that name data sets, with their local files."""
        found: dict[str, tuple[str, ...]] = {}
        for field, split in DEFAULT_SPLITS.items():
            names = getattr(section, field, ())
            if any(map(is_data_set, names)):
                files = [_files(f"{key}.{field}", name, split, fetch, issues) for name in names]
                found[field] = tuple(file for part in files for file in part)
        return found

    data = recipe.data
    sources = tuple(
        source.model_copy(update=local(f"data.sources.{index}", source))
        for index, source in enumerate(data.sources)
    )
    data = data.model_copy(update={**local("data", data), "sources": sources})
    return recipe.model_copy(update={"data": data}), issues


def _files(
    key: str, name: str, split: str, fetch: FetchDataSet, issues: list[ConfigIssue]
) -> Sequence[str]:
    if not is_data_set(name):
        return [name]
    try:
        return [str(file) for file in fetch(parse_data_set(name, split))]
    except ConfigError as error:
        issues += [replace(issue, key=key, value=name) for issue in error.issues]
        return []

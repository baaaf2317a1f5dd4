"""The first row of each data file that is on this machine, read before anything is started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mppo import register
from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.schema import Recipe
from mppo.config.sections.data import SourceConfig
from mppo.data.rows import DataRow, read_rows
from mppo.rewards.verifiers import unknown, verifier_for

_HIGH_RATE = 0.1


def row_issues(recipe: Recipe) -> list[ConfigIssue]:
    """Faults that the first row of a file shows: no row, a missing column, no verifier for it.

    Where there are any, all rows are read, so that all faults are told at once. Files that are not
    on this machine, or need a package that is not, are left to the run.
    """
    issues: list[ConfigIssue] = []
    for key, source in recipe.data.prompt_sources.items():
        for limit in (1, None):
            rows, found = _read(key, source, limit)
            found += _verifier_issues(recipe, key, source, rows)
            if not found:
                break
        else:
            issues += found
    return issues


def odd_values(recipe: Recipe) -> Iterator[str]:
    """A line for every value that is allowed and most likely a mistake."""
    for key, source in recipe.data.prompt_sources.items():
        both = set(source.train_files) & set(source.val_files)
        for file in sorted(both if source.val_size != 0 else ()):
            why = "is a training file too: validation then shows no unseen prompts"
            yield f"{key}.val_files: {file} {why}"
    roles = {"actor": recipe.actor, "critic": recipe.critic}
    for name, role in roles.items():
        if role.optim.lr > _HIGH_RATE and (name == "actor" or recipe.algorithm.uses_critic):
            why = "moves a weight by about that much in a step"
            yield f"{name}.optim.lr = {role.optim.lr:g}: Adam {why}; usual are 1e-7 to 1e-3"


def _read(
    key: str, source: SourceConfig, limit: int | None
) -> tuple[list[DataRow], list[ConfigIssue]]:
    """Rows of each file of a source, at most ``limit`` of each, and what is wrong with others."""
    assert source.prompt_key is not None
    rows: list[DataRow] = []
    issues: list[ConfigIssue] = []
    splits = {"train": source.train_files, "val": source.val_files if source.val_size != 0 else ()}
    for split, files in splits.items():
        for file in files:
            if not Path(file).expanduser().is_file():
                continue
            name, keys = f"{key}.{split}_files", (source.prompt_key, source.answer_key)
            try:
                rows += read_rows([file], name, *keys, limit, source.name)
            except ConfigError as error:
                if not isinstance(error.__cause__, ModuleNotFoundError):
                    issues += error.issues
    return rows, issues


def _verifier_issues(
    recipe: Recipe, key: str, source: SourceConfig, rows: Sequence[DataRow]
) -> Iterator[ConfigIssue]:
    """A verifier that does not exist, and data sources without one, if nothing but rules can score
    their responses."""
    named = {f"{key}.verifier": source.verifier, "reward.verifier": recipe.reward.verifier}
    for place, name in named.items() if recipe.reward.name == "rule" else ():
        if name and name not in register.verifier.names:
            yield unknown(place, name, register.verifier.names)
    reward, alone = recipe.reward, recipe.reward_model.in_use and recipe.reward.weight is None
    if reward.name != "rule" or reward.verifier or source.verifier or alone:
        return
    if recipe.rollout.agent is not None:  # it may give all scores itself
        return
    for name in sorted({row.data_source for row in rows}):
        try:
            verifier_for(name)
        except ConfigError as error:
            yield from error.issues

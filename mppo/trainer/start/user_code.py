"""Code and data that a recipe names, looked at before a model is read or torch is imported: small
data files entirely, of others the first row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from mppo import register
from mppo.agents.agent_check import check_agent
from mppo.data.rows import DataRow, read_rows, too_few_prompts
from mppo.data.verifiers_environment import environment_rows
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.data import SourceConfig
from mppo.rewards.verifiers import unknown, verifier_for
from mppo.rewards.workers.named_code import imported_form
from mppo.trainer.start.user_parts import NO_PARTS, UserParts

SPLITS = ("train", "val")
_HIGH_RATE = 0.1
_SMALL = 8 << 20
"""Most bytes of a file whose rows are all read."""


def row_issues(recipe: Recipe, splits: Sequence[str] = SPLITS) -> list[ConfigIssue]:
    """Faults that the first rows show: none, a missing column, no verifier, too few for a batch.
    Where there are any, all rows are read, so that all faults are told at once. Files that are not
    on this machine, or need a package that is not, are left to the run."""
    issues: list[ConfigIssue] = []
    for key, source in recipe.data.prompt_sources.items():
        for limit in (1, None):
            rows, found = _read(key, source, splits, limit)
            found += _verifier_issues(recipe, key, source, rows)
            if not found:
                break
        else:
            issues += found
    return issues or [*(_batch_issues(recipe) if "train" in splits else ())]


def _batch_issues(recipe: Recipe) -> Iterator[ConfigIssue]:
    size, (source, *others) = recipe.data.train_batch_size, recipe.data.prompt_sources.values()
    files = source.train_files
    if others or not files or not all(map(_is_small, files)):
        return
    rows, issues = _read("data", source, ("train",), None)
    rows = rows[: source.train_size]
    if not issues and 0 < len(rows) < size:
        yield too_few_prompts(size, len(rows), f"{len(rows)} in {', '.join(files)}")


def _is_small(file: str) -> bool:
    path = Path(file).expanduser()
    return path.is_file() and path.stat().st_size <= _SMALL


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
    key: str, source: SourceConfig, splits: Sequence[str], limit: int | None
) -> tuple[list[DataRow], list[ConfigIssue]]:
    """Rows of each file of a source, at most ``limit`` of each, and what is wrong with others."""
    assert source.prompt_key is not None
    rows: list[DataRow] = []
    issues: list[ConfigIssue] = []
    used = {"train": source.train_files, "val": source.val_files if source.val_size != 0 else ()}
    for split in splits:
        for file in used[split]:
            if not Path(file).expanduser().is_file():
                continue
            name, keys = f"{key}.{split}_files", (source.prompt_key, source.answer_key)
            try:
                most = None if _is_small(file) else limit
                rows += read_rows([file], name, *keys, most, source.name)
            except ConfigError as error:
                if not isinstance(error.__cause__, ModuleNotFoundError):
                    issues += error.issues
    return rows, issues


def _verifier_issues(
    recipe: Recipe, key: str, source: SourceConfig, rows: Sequence[DataRow]
) -> Iterator[ConfigIssue]:
    """A verifier that does not exist, and sources without one that nothing but rules can score."""
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


def input_issues(
    recipe: Recipe,
    remarks: list[str] | None = None,
    parts: UserParts = NO_PARTS,
    splits: Sequence[str] = SPLITS,
) -> list[ConfigIssue]:
    """Import the recipe's reward function, agent and tools, check their parameters, make its
    environment, and read rows of the data files that are here. ``remarks`` receives a line for code
    that needs a package that is not installed here; None: that is an issue."""
    if recipe.trainer.replay is not None and "train" in splits:
        return []
    issues = row_issues(recipe, splits)
    reward, agent = recipe.reward, recipe.rollout.agent
    checks: list[Callable[[], object]] = []
    if reward.name == "function" and parts.reward is None:
        checks.append(partial(imported_form, str(reward.function), reward.kwargs))
    if agent is not None and parts.agent is None:
        checks.append(partial(check_agent, agent))
    if (made := recipe.rollout.environment) is not None:
        split = "train" if "train" in splits else "val"
        checks.append(partial(environment_rows, made.verifiers, made.arguments, split, 1))
    for check in checks:
        try:
            check()
        except ConfigError as error:
            issues += _issues(error, remarks)
    return issues


def _issues(error: ConfigError, remarks: list[str] | None) -> list[ConfigIssue]:
    """The issues; none if a package of the job's machine is all that is missing here."""
    cause = error.__cause__
    if remarks is not None and isinstance(cause, ModuleNotFoundError):
        (issue,) = error.issues
        remarks.append(f"{issue.key} = {issue.value!r} was not checked: {cause}")
        return []
    return list(error.issues)

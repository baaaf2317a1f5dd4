"""Load a recipe and check it with what this machine has: files, data sets, models' configs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mppo.hub.local_model import is_hub_name
from mppo.recipe.checks import check_recipe, model_issue, without_duplicates
from mppo.recipe.data_set_name import DataSetName, is_data_set, parse_data_set
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.load import Given, read_recipe, source_name
from mppo.recipe.model_shape import model_shape
from mppo.recipe.rules.rule import world_size_of
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.model import Hub
from mppo.recipe.sections.role_config import RoleConfig
from mppo.trainer.start.file_checks import check_code, check_files, check_run_folder
from mppo.weights.frozen import freeze_issues

ReadConfig = Callable[[str], Any]
"""From a model's path to its Hugging Face config object; raises ValueError or ConfigError."""

FetchModel = Callable[[str, Hub, bool, bool], Path]
"""From a model's name, the hub that has it, whether its weights are needed, and whether its code
may run, to the folder it was downloaded to; raises ConfigError."""

FetchDataSet = Callable[[DataSetName], Sequence[Path]]
"""From a data set to its local files, downloaded if they are not there; raises ConfigError."""

_DEFAULT_SPLITS = {"train_files": "train", "val_files": "test", "ptx_files": "train"}
"""The split of a data set without one, by key."""

RoleCheck = Callable[[RoleConfig, Any], Iterable[ConfigIssue]]
"""From a role and its model's config object to issues that need Megatron or the weights to find;
raises ValueError for a model that Megatron cannot represent."""

CheckInputs = Callable[[Recipe], Iterable[ConfigIssue]]
"""From a recipe to the issues of the code and data that it names."""

EngineCheck = Callable[[Recipe, Any], Iterable[ConfigIssue]]
"""From a recipe and the actor's config object to issues of the rollout engine with that model;
raises as ``RoleCheck``."""


def load_checked(
    given: Given,
    overrides: Sequence[str],
    world_size: int | None,
    read_hf_config: ReadConfig | None = None,
    files: bool = True,
    role_checks: Sequence[RoleCheck] = (),
    engine_check: EngineCheck | None = None,
    remarks: list[str] | None = None,
    fetch_model: FetchModel | None = None,
    fetch_data_set: FetchDataSet | None = None,
    ranks_per_node: int | None = None,
    check_inputs: CheckInputs | None = None,
    concerns: Callable[[str], bool] = lambda key: True,
) -> Recipe:
    """Load a recipe and check it: keys, rules and files first, then what needs the models' configs.
    Names of models and data sets on the Hub are replaced by their local folders and files.

    Args:
        world_size: number of ranks; None: the recipe's own (``world_size_of``).
        read_hf_config: reads the config of a model path; None skips all checks of models.
        files: check that all files exist, not only those of code (a dry run needs no others).
        role_checks, engine_check: run on every role, and on the rollout engine, if the model's
            config could be read.
        remarks: receives a line for every key without effect, or of another meaning than written.
        fetch_model: downloads a model of the Hub, if ``model.hub`` is set.
        fetch_data_set: downloads the data sets of the Hub that the recipe names.
        ranks_per_node: None: ``trainer.n_gpus_per_node``.
        check_inputs: looks at the recipe's code and data, once their files are there.
        concerns: whether an issue of a key counts; the others are left out.

    Raises:
        ConfigError: with all issues; those that need a model's config.json only if there are no
            others.
    """
    if world_size is not None and world_size < 1:
        why, fix = "a run has at least one rank", "give a number of ranks, or leave it out"
        raise ConfigError([ConfigIssue("--world-size", world_size, why, fix)])
    recipe, issues = read_recipe(given, overrides, remarks)
    if recipe is None:
        raise ConfigError(issues, source=source_name(given))
    world_size = world_size or world_size_of(recipe)
    issues += _unless_known(
        check_recipe(recipe, world_size, {}, _keys(issues), ranks_per_node), issues
    )
    issues = [issue for issue in issues if concerns(issue.key)]
    # downloads only for a recipe without other issues: they take minutes
    if fetch_model is not None and recipe.model.hub and not issues:
        recipe, issues = _download_models(recipe, fetch_model, files)
    if fetch_data_set is not None and files and not issues:
        recipe, issues = _with_local_files(recipe, fetch_data_set)
    issues += _unless_known(check_run_folder(recipe), issues)
    issues += _unless_known(check_files(recipe) if files else check_code(recipe), issues)
    issues = [issue for issue in issues if concerns(issue.key)]
    if check_inputs is not None and not issues:
        issues += check_inputs(recipe)
    if not issues and read_hf_config is not None:  # takes seconds; all checks above are instant
        configs, issues = _read_configs(recipe, read_hf_config)
        issues += check_recipe(recipe, world_size, configs, _keys(issues), ranks_per_node)
        for check in (_check_freeze, *role_checks):
            issues += _check_roles(recipe, configs, check, _keys(issues))
        actor_is_valid = "actor" in configs and "model.path" not in _keys(issues)
        if engine_check is not None and actor_is_valid:
            issues += _check_engine(recipe, configs["actor"], engine_check)
    if issues:
        raise ConfigError(without_duplicates(issues), source=source_name(given))
    return recipe


def _keys(issues: Iterable[ConfigIssue]) -> set[str]:
    return {issue.key for issue in issues}


def _unless_known(found: Iterable[ConfigIssue], issues: Iterable[ConfigIssue]) -> list[ConfigIssue]:
    known = _keys(issues)
    return [issue for issue in found if issue.key not in known]


def _download_models(
    recipe: Recipe, fetch: FetchModel, weights: bool
) -> tuple[Recipe, list[ConfigIssue]]:
    """The recipe with local folders for models of the Hub, and the issues of failed downloads."""
    issues: list[ConfigIssue] = []
    trust = recipe.model.trust_remote_code
    for section, used in (
        ("model", True),
        ("critic", recipe.algorithm.uses_critic),
        ("ref", recipe.uses_reference),
        ("reward_model", recipe.reward_model.in_use),
    ):
        part = getattr(recipe, section)
        if not used or not part.path or not is_hub_name(part.path):
            continue
        try:
            folder = str(fetch(part.path, recipe.model.hub, weights, trust))
        except ConfigError as error:
            own = {"model.path": f"{section}.path"}
            issues += [replace(issue, key=own.get(issue.key, issue.key)) for issue in error.issues]
            continue
        recipe = recipe.model_copy(update={section: part.model_copy(update={"path": folder})})
    return recipe, issues


def _with_local_files(recipe: Recipe, fetch: FetchDataSet) -> tuple[Recipe, list[ConfigIssue]]:
    """The recipe with local files for data sets of the Hub, and the issues of failed downloads."""
    issues: list[ConfigIssue] = []

    def local(key: str, section: Any) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for field, split in _DEFAULT_SPLITS.items():
            names = getattr(section, field, ())
            if any(map(is_data_set, names)):
                files = [_fetched(f"{key}.{field}", name, split, fetch, issues) for name in names]
                found[field] = tuple(file for part in files for file in part)
        return found

    sources = tuple(
        source.model_copy(update=local(f"data.sources.{index}", source))
        for index, source in enumerate(recipe.data.sources)
    )
    found = recipe.data.model_copy(update={**local("data", recipe.data), "sources": sources})
    return recipe.model_copy(update={"data": found}), issues


def _fetched(
    key: str, name: str, split: str, fetch: FetchDataSet, issues: list[ConfigIssue]
) -> Sequence[str]:
    if not is_data_set(name):
        return [name]
    try:
        return [str(file) for file in fetch(parse_data_set(name, split))]
    except ConfigError as error:
        issues += [replace(issue, key=key, value=name) for issue in error.issues]
        return []


def _read_configs(
    recipe: Recipe, read_hf_config: ReadConfig
) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Each role's config object, by role, and the issues of models whose config cannot be read."""
    configs: dict[str, Any] = {}
    issues: list[ConfigIssue] = []
    for role in recipe.roles():
        try:
            configs[role.name] = read_hf_config(role.path)
        except ConfigError as error:
            issues += [replace(issue, key=role.path_key) for issue in error.issues]
        except (ValueError, OSError) as error:
            issues.append(model_issue(role.path_key, role.path, error))
    return configs, without_duplicates(issues)


def _check_roles(
    recipe: Recipe, configs: Mapping[str, Any], check: RoleCheck, keys_with_issues: Collection[str]
) -> list[ConfigIssue]:
    """The issues that ``check`` finds in roles whose model has a config and no issue yet."""
    issues: list[ConfigIssue] = []
    for role in recipe.roles():
        if role.name in configs and role.path_key not in keys_with_issues:
            try:
                issues += check(role, configs[role.name])
            except (ValueError, OSError) as error:
                issues.append(model_issue(role.path_key, role.path, error))
    return without_duplicates(issues)


def _check_freeze(role: RoleConfig, config: Any) -> Iterable[ConfigIssue]:
    """What the patterns of ``critic.freeze`` do not match in the role's model."""
    return freeze_issues(model_shape(config), role.freeze) if role.freeze else ()


def _check_engine(recipe: Recipe, hf_config: Any, check: EngineCheck) -> list[ConfigIssue]:
    """The issues that ``check`` finds, or one for a model that it cannot represent."""
    try:
        return list(check(recipe, hf_config))
    except ValueError as error:
        return [model_issue("model.path", recipe.model.path, error)]

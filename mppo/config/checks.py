"""Everything about a recipe that takes more than one key, or the model, or the disk, to judge."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.load import read_recipe, source_name
from mppo.config.rules import algorithm, engine, layout, training
from mppo.config.rules.files import check_files, check_run_folder, is_hub_name
from mppo.config.rules.rule import RULES, RoleCase, RuleContext, roles_in_use, world_size_of
from mppo.config.schema import Recipe
from mppo.weights.shape import model_shape, rope_parameters

RULE_MODULES = (layout, training, algorithm, engine)
"""Importing them fills ``RULES``."""

ReadConfig = Callable[[str], Any]
"""Model path to its Hugging Face config object; raises ValueError or ConfigError."""

FetchModel = Callable[[str, bool, bool], Path]
"""Hub's name, whether weights are needed and whether its code may run, to the model's folder;
raises ConfigError."""

JudgeRole = Callable[[RoleCase, Any], Iterable[ConfigIssue]]
"""Role and config object of its model to what only Megatron can tell to be wrong; raises ValueError
for a model it cannot represent."""

JudgeEngine = Callable[[Recipe, Any], Iterable[ConfigIssue]]
"""Recipe and config object of the actor's model to where the rollout engine would compute another
model; raises as ``JudgeRole``."""


def check_recipe(
    recipe: Recipe,
    world_size: int,
    hf_configs: Mapping[str, Any],
    known_issues: Collection[str] = (),
) -> list[ConfigIssue]:
    """Apply every rule between keys, layouts and models. Touches no file.

    Args:
        recipe: a valid recipe.
        world_size: number of ranks.
        hf_configs: Hugging Face config object of every role's own model; rules that need one that
            is absent are skipped for that role.
        known_issues: keys already found wrong; rules that read one of them stay silent.

    Returns:
        Every issue, none where all is well.
    """
    issues: list[ConfigIssue] = []
    shapes = {}
    for role in roles_in_use(recipe):
        if role.name in hf_configs:
            try:
                shapes[role.name] = model_shape(hf_configs[role.name])
            except ValueError as error:
                issues.append(_model_fault(role.path_key, role.path, error))
    positions = _positions(hf_configs["actor"]) if "actor" in shapes else None
    case = RuleContext(recipe, world_size, shapes, positions)
    for keys, function in RULES:
        if not _touches(keys, known_issues):
            issues += function(case)
    return _told_once(issues)


def load_checked(
    path: str | Path | None,
    overrides: Sequence[str],
    world_size: int | None,
    read_hf_config: ReadConfig | None = None,
    files: bool = True,
    judges: Sequence[JudgeRole] = (),
    judge_engine: JudgeEngine | None = None,
    remarks: list[str] | None = None,
    fetch_model: FetchModel | None = None,
) -> Recipe:
    """Load a recipe and judge all of it: form, files and rules first, then what takes its models.

    Args:
        path: YAML file; None starts from the defaults.
        overrides: ``section.key=value`` settings.
        world_size: number of ranks; None: as many as the recipe asks for (``world_size_of``).
        read_hf_config: opens the config of a model path; None leaves models unjudged.
        files: whether the files must be there (a dry run does without weights and data).
        judges: judge every role whose model is known, one after the other.
        judge_engine: judges the rollout engine where the actor's model is known; None leaves it
            out.
        remarks: gets what the log should say about keys that are taken otherwise than written.
        fetch_model: downloads a model of the Hub, where ``model.hub`` asks for it.

    Returns:
        The recipe; models of the Hub are replaced by the folders they are in.

    Raises:
        ConfigError: names every issue at once; those that only a model's config.json tells, where
            there is no other.
    """
    recipe, issues = read_recipe(path, overrides, remarks)
    if recipe is None:
        raise ConfigError(issues, source=source_name(path))
    world_size = world_size or world_size_of(recipe)
    issues += _unless_known(check_recipe(recipe, world_size, {}, _keys(issues)), issues)
    if fetch_model is not None and recipe.model.hub and not issues:
        recipe, issues = _fetched(recipe, fetch_model, files)
    issues += _unless_known(check_run_folder(recipe), issues)
    if files:
        issues += _unless_known(check_files(recipe), issues)
    if not issues and read_hf_config is not None:  # that takes seconds; all before it, a moment
        configs, issues = _read_configs(recipe, read_hf_config)
        issues += check_recipe(recipe, world_size, configs, _keys(issues))
        for judge in judges:
            issues += _judge_roles(recipe, configs, judge, _keys(issues))
        faulty = _keys(issues)
        if judge_engine is not None and "actor" in configs and "model.path" not in faulty:
            issues += _judge_engine(recipe, configs["actor"], judge_engine)
    if issues:
        raise ConfigError(_told_once(issues), source=source_name(path))
    return recipe


def _keys(issues: Iterable[ConfigIssue]) -> set[str]:
    return {issue.key for issue in issues}


def _unless_known(found: Iterable[ConfigIssue], issues: Iterable[ConfigIssue]) -> list[ConfigIssue]:
    """Without those of keys that are known to be wrong."""
    known = _keys(issues)
    return [issue for issue in found if issue.key not in known]


def _fetched(recipe: Recipe, fetch: FetchModel, weights: bool) -> tuple[Recipe, list[ConfigIssue]]:
    """A recipe whose models of the Hub are folders, and those that could not be had."""
    issues: list[ConfigIssue] = []
    trust = recipe.model.trust_remote_code
    for section, used in (
        ("model", True),
        ("critic", recipe.algorithm.uses_critic),
        ("ref", recipe.uses_reference),
    ):
        part = getattr(recipe, section)
        if not used or not part.path or not is_hub_name(part.path):
            continue
        try:
            folder = str(fetch(part.path, weights, trust))
        except ConfigError as error:
            issues += [replace(issue, key=f"{section}.path") for issue in error.issues]
            continue
        recipe = recipe.model_copy(update={section: part.model_copy(update={"path": folder})})
    return recipe, issues


def _read_configs(
    recipe: Recipe, read_hf_config: ReadConfig
) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """The config object of every role's own model, and what is wrong with models not readable."""
    configs: dict[str, Any] = {}
    issues: list[ConfigIssue] = []
    for role in roles_in_use(recipe):
        try:
            configs[role.name] = read_hf_config(role.path)
        except ConfigError as error:
            issues += [replace(issue, key=role.path_key) for issue in error.issues]
        except (ValueError, OSError) as error:
            issues.append(_model_fault(role.path_key, role.path, error))
    return configs, _told_once(issues)


def _judge_roles(
    recipe: Recipe, configs: Mapping[str, Any], judge: JudgeRole, faulty: Collection[str]
) -> list[ConfigIssue]:
    """What a judge finds in the roles whose model is known and has no issue."""
    issues: list[ConfigIssue] = []
    for role in roles_in_use(recipe):
        if role.name in configs and role.path_key not in faulty:
            try:
                issues += judge(role, configs[role.name])
            except (ValueError, OSError) as error:
                issues.append(_model_fault(role.path_key, role.path, error))
    return _told_once(issues)


def _judge_engine(recipe: Recipe, hf_config: Any, judge_engine: JudgeEngine) -> list[ConfigIssue]:
    """What ``judge_engine`` finds, or that the actor's model cannot be represented."""
    try:
        return list(judge_engine(recipe, hf_config))
    except ValueError as error:
        return [_model_fault("model.path", recipe.model.path, error)]


def _model_fault(key: str, name: str, error: Exception) -> ConfigIssue:
    return ConfigIssue(
        key, name, " ".join(str(error).split()), "give a model folder of a known family"
    )


def _told_once(issues: Iterable[ConfigIssue]) -> list[ConfigIssue]:
    """Without what is wrong with several roles in the same way."""
    return list({(issue.key, issue.why): issue for issue in issues}.values())


def _positions(hf_config: Any) -> int | None:
    """Longest sequence known to the position encoding, where it is not rescaled."""
    limit = getattr(hf_config, "max_position_embeddings", None)
    return limit if rope_parameters(hf_config)["rope_type"] == "default" else None


def _touches(keys: Collection[str], known_issues: Collection[str]) -> bool:
    """Whether a rule reads a key that is already known to be wrong."""
    return any(_reads(pattern, issue) for pattern in keys for issue in known_issues)


def _reads(pattern: str, issue: str) -> bool:
    parts, found = pattern.split("."), issue.split(".")
    return all(p in ("*", f) for p, f in zip(parts, found))

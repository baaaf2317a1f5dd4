"""Everything about a recipe that takes more than one key, or the model, or the disk, to judge."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mppo.config import algorithm_rules, engine_rules, layout_rules, training_rules
from mppo.config.errors import ConfigError, Fault
from mppo.config.file_rules import check_files, check_run_folder, is_hub_name
from mppo.config.load import read_recipe, source_name
from mppo.config.rule import RULES, Case, RoleCase, roles_in_use, world_size_of
from mppo.config.schema import Recipe
from mppo.weights.shape import model_shape, rope_parameters

RULE_MODULES = (layout_rules, training_rules, algorithm_rules, engine_rules)
"""Importing them fills ``RULES``."""

ReadConfig = Callable[[str], Any]
"""Model path to its Hugging Face config object; raises ValueError or ConfigError."""

FetchModel = Callable[[str, bool, bool], Path]
"""Hub's name, whether weights are needed and whether its code may run, to the model's folder;
raises ConfigError."""

JudgeRole = Callable[[RoleCase, Any], Iterable[Fault]]
"""Role and config object of its model to what only Megatron can tell to be wrong; raises ValueError
for a model it cannot represent."""

JudgeEngine = Callable[[Recipe, Any], Iterable[Fault]]
"""Recipe and config object of the actor's model to where the rollout engine would compute another
model; raises as ``JudgeRole``."""


def check_recipe(
    recipe: Recipe,
    world_size: int,
    hf_configs: Mapping[str, Any],
    known_faults: Collection[str] = (),
) -> list[Fault]:
    """Apply every rule between keys, layouts and models. Touches no file.

    Args:
        recipe: a valid recipe.
        world_size: number of ranks.
        hf_configs: Hugging Face config object of every role's own model; rules that need one that
            is absent are skipped for that role.
        known_faults: keys already found wrong; rules that read one of them stay silent.

    Returns:
        Every fault, none where all is well.
    """
    faults: list[Fault] = []
    shapes = {}
    for role in roles_in_use(recipe):
        if role.name in hf_configs:
            try:
                shapes[role.name] = model_shape(hf_configs[role.name])
            except ValueError as error:
                faults.append(_model_fault(role.path_key, role.path, error))
    positions = _positions(hf_configs["actor"]) if "actor" in shapes else None
    case = Case(recipe, world_size, shapes, positions)
    for keys, function in RULES:
        if not _touches(keys, known_faults):
            faults += function(case)
    return _told_once(faults)


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
        ConfigError: names every fault at once; those that only a model's config.json tells, where
            there is no other.
    """
    recipe, faults = read_recipe(path, overrides, remarks)
    if recipe is None:
        raise ConfigError(faults, source=source_name(path))
    world_size = world_size or world_size_of(recipe)
    faults += _unless_known(check_recipe(recipe, world_size, {}, _keys(faults)), faults)
    if fetch_model is not None and recipe.model.hub and not faults:
        recipe, faults = _fetched(recipe, fetch_model, files)
    faults += _unless_known(check_run_folder(recipe), faults)
    if files:
        faults += _unless_known(check_files(recipe), faults)
    if not faults and read_hf_config is not None:  # that takes seconds; all before it, a moment
        configs, faults = _read_configs(recipe, read_hf_config)
        faults += check_recipe(recipe, world_size, configs, _keys(faults))
        for judge in judges:
            faults += _judge_roles(recipe, configs, judge, _keys(faults))
        faulty = _keys(faults)
        if judge_engine is not None and "actor" in configs and "model.path" not in faulty:
            faults += _judge_engine(recipe, configs["actor"], judge_engine)
    if faults:
        raise ConfigError(_told_once(faults), source=source_name(path))
    return recipe


def _keys(faults: Iterable[Fault]) -> set[str]:
    return {fault.key for fault in faults}


def _unless_known(found: Iterable[Fault], faults: Iterable[Fault]) -> list[Fault]:
    """Without those of keys that are known to be wrong."""
    known = _keys(faults)
    return [fault for fault in found if fault.key not in known]


def _fetched(recipe: Recipe, fetch: FetchModel, weights: bool) -> tuple[Recipe, list[Fault]]:
    """A recipe whose models of the Hub are folders, and those that could not be had."""
    faults: list[Fault] = []
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
            faults += [replace(fault, key=f"{section}.path") for fault in error.faults]
            continue
        recipe = recipe.model_copy(update={section: part.model_copy(update={"path": folder})})
    return recipe, faults


def _read_configs(recipe: Recipe, read_hf_config: ReadConfig) -> tuple[dict[str, Any], list[Fault]]:
    """The config object of every role's own model, and what is wrong with models not readable."""
    configs: dict[str, Any] = {}
    faults: list[Fault] = []
    for role in roles_in_use(recipe):
        try:
            configs[role.name] = read_hf_config(role.path)
        except ConfigError as error:
            faults += [replace(fault, key=role.path_key) for fault in error.faults]
        except (ValueError, OSError) as error:
            faults.append(_model_fault(role.path_key, role.path, error))
    return configs, _told_once(faults)


def _judge_roles(
    recipe: Recipe, configs: Mapping[str, Any], judge: JudgeRole, faulty: Collection[str]
) -> list[Fault]:
    """What a judge finds in the roles whose model is known and has no fault."""
    faults: list[Fault] = []
    for role in roles_in_use(recipe):
        if role.name in configs and role.path_key not in faulty:
            try:
                faults += judge(role, configs[role.name])
            except (ValueError, OSError) as error:
                faults.append(_model_fault(role.path_key, role.path, error))
    return _told_once(faults)


def _judge_engine(recipe: Recipe, hf_config: Any, judge_engine: JudgeEngine) -> list[Fault]:
    """What ``judge_engine`` finds, or that the actor's model cannot be represented."""
    try:
        return list(judge_engine(recipe, hf_config))
    except ValueError as error:
        return [_model_fault("model.path", recipe.model.path, error)]


def _model_fault(key: str, name: str, error: Exception) -> Fault:
    return Fault(key, name, " ".join(str(error).split()), "give a model folder of a known family")


def _told_once(faults: Iterable[Fault]) -> list[Fault]:
    """Without what is wrong with several roles in the same way."""
    return list({(fault.key, fault.why): fault for fault in faults}.values())


def _positions(hf_config: Any) -> int | None:
    """Longest sequence known to the position encoding, where it is not rescaled."""
    limit = getattr(hf_config, "max_position_embeddings", None)
    return limit if rope_parameters(hf_config)["rope_type"] == "default" else None


def _touches(keys: Collection[str], known_faults: Collection[str]) -> bool:
    """Whether a rule reads a key that is already known to be wrong."""
    return any(_reads(pattern, fault) for pattern in keys for fault in known_faults)


def _reads(pattern: str, fault: str) -> bool:
    parts, found = pattern.split("."), fault.split(".")
    return all(p in ("*", f) for p, f in zip(parts, found))

"""Load a recipe file and overrides into a frozen, validated ``Recipe``.

``python -m mppo.recipe.load --json-schema`` prints the schema that editors complete and check
recipes with.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from mppo.recipe.computed_keys import TRL_KEYS, computed_keys
from mppo.recipe.document import (
    BASE_KEY,
    apply_overrides,
    block_yaml,
    document_of,
    merge_documents,
    read_document,
)
from mppo.recipe.errors import ConfigError, ConfigIssue, nearest
from mppo.recipe.other_systems import canonical_key, system_of
from mppo.recipe.presets import apply_preset
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.agent import following_environment
from mppo.recipe.sections.megatron import Offload
from mppo.recipe.sections.registered import load_plugins
from mppo.safety.redact import redact

PATH_KEYS = frozenset(
    {
        "model.path", "model.tokenizer_path", "critic.path", "ref.path",
        "reward_model.path", "reward_model.tokenizer_path",
        "data.train_files", "data.val_files", "data.ptx_files", "data.sources.*.train_files",
        "data.sources.*.val_files", "trainer.default_local_dir", "trainer.plugins",
    }
)  # fmt: skip
"""Keys with paths: ``~`` and ``$VARIABLE`` are expanded in their values; ``*`` is any number."""


Given = str | Path | Mapping[str, Any] | Recipe | None
"""A recipe's file, its content as a mapping, a recipe that was loaded before, or None: the
defaults."""


def load_recipe(
    given: Given, overrides: Sequence[str] = (), remarks: list[str] | None = None
) -> Recipe:
    """Read, merge and validate a recipe; ConfigError with all issues. See ``read_recipe``."""
    recipe, issues = read_recipe(given, overrides, remarks)
    if recipe is None or issues:
        raise ConfigError(issues, source=source_name(given))
    return recipe


def source_file(given: Given) -> Path | None:
    """The file that a recipe comes from, if there is one."""
    if isinstance(given, Recipe):
        return given.file
    return Path(given) if isinstance(given, str | Path) else None


def source_name(given: Given) -> str:
    path = source_file(given)
    if path is not None:
        return f"recipe {path}"
    return "recipe (defaults and command line)" if given is None else "recipe"


def read_recipe(
    given: Given, overrides: Sequence[str] = (), remarks: list[str] | None = None
) -> tuple[Recipe | None, list[ConfigIssue]]:
    """Load a recipe, with ``section.key=value`` settings of which later ones win, and return its
    issues instead of raising. Four passes: parse the file and its bases under mppo's names of keys,
    apply the settings, add what other keys decide, and validate.

    Keys with an issue have their default; the recipe is None if that is impossible. ``remarks``
    receives a line for the log for every key that is given twice or from which others are computed.
    """
    document, issues = _parse(given)
    if isinstance(given, str | Path) and issues and not document:
        return None, issues
    document, override_issues = apply_overrides(document, overrides)
    issues += override_issues
    remarks = [] if remarks is None else remarks
    remarks += repeated_overrides(overrides)
    document = _complete(document, issues, remarks)
    return _validate(document, issues), issues


def _parse(given: Given) -> tuple[dict[str, Any], list[ConfigIssue]]:
    if given is None:
        return {}, []
    if isinstance(given, Recipe):
        return given.model_dump(mode="json"), []
    return document_of(given) if isinstance(given, Mapping) else read_document(Path(given))


def _complete(
    document: Mapping[str, Any], issues: list[ConfigIssue], remarks: list[str]
) -> dict[str, Any]:
    """Add the keys that follow from others, of the agent's environment and of the preset, to those
    that are given."""
    given = computed_keys(document, issues, remarks)
    issues += load_plugins(given)
    given = merge_documents(following_environment(given), given)
    return _normalise(apply_preset(given), Recipe, "", issues)


def _validate(document: dict[str, Any], issues: list[ConfigIssue]) -> Recipe | None:
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        issues += translate(error)
        for entry in error.errors():
            _drop(document, [part for part in entry["loc"] if not _is_branch(part)])
    # once more with defaults for the refused keys, so that the rules can check all others
    try:
        return Recipe.model_validate(document)
    except ValidationError:
        return None


def repeated_overrides(overrides: Sequence[str]) -> list[str]:
    """A line for every key to which the command line gives two different values."""
    given: dict[str, str] = {}
    lines = []
    for override in overrides:
        written, _, value = override.lstrip("+").partition("=")
        key = canonical_key(written.strip())
        if given.setdefault(key, value) != value:
            lines.append(
                f"{key} is given twice: {given[key]}, then {value}; the last value is used"
            )
            given[key] = value
    return lines


def translate(error: ValidationError) -> list[ConfigIssue]:
    """pydantic's errors as config issues, one per key."""
    issues: dict[str, ConfigIssue] = {}
    for entry in error.errors():
        parts = [part for part in entry["loc"] if not _is_branch(part)]
        key = ".".join(str(part) for part in parts)
        why, fix = _explain(entry, parts)
        if key not in issues:
            issues[key] = ConfigIssue(key, entry["input"], why, fix)
        elif entry["type"] in ("literal_error", "model_type"):
            # the other branch of "a number or a word", or of "a word or a section"
            issues[key] = replace(issues[key], fix=f"{issues[key].fix}; or {fix}")
    # a mistake inside a section is not one of the word that the key could have instead
    return [i for k, i in issues.items() if not any(o.startswith(f"{k}.") for o in issues)]


def recipe_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """All dotted keys of the schema, without the sections themselves."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        inner, items = _section_of(field.annotation), _sections_in(field.annotation)
        keys += recipe_keys(inner, f"{prefix}{name}.") if inner else [prefix + name]
        keys += recipe_keys(items, f"{prefix}{name}.*.") if items else []
    return keys


def resolved_yaml(recipe: Recipe) -> str:
    """The recipe with all defaults as YAML; except for secrets it loads to the same recipe."""
    plain = redact(recipe.model_dump(mode="json"))
    return block_yaml(plain)


def json_schema() -> dict[str, Any]:
    """The JSON schema of a recipe file, for completion and checks in editors."""
    schema = Recipe.model_json_schema()
    schema["title"] = "mppo recipe"
    schema["properties"][BASE_KEY] = {
        "description": "Recipe file or files to start from, relative to this file.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    for key, description in TRL_KEYS.items():
        schema["properties"][key] = {"description": description, "type": "integer"}
    return schema


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class of a field (also of ``Section | None``); None if it is not a section."""
    options = _options(annotation)
    sections = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
    return sections[0] if sections else None


def _sections_in(annotation: Any) -> type[BaseModel] | None:
    """The section class of the items of a field that is a tuple of sections; else None."""
    return _section_of(typing.get_args(annotation)[0]) if _is_tuple(annotation) else None


def _is_tuple(annotation: Any) -> bool:
    return typing.get_origin(annotation) is tuple


def _options(annotation: Any) -> tuple[Any, ...]:
    """The branches of a union, without their constraints; of another type, itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(branch for part in typing.get_args(annotation) for branch in _options(part))
    if typing.get_origin(annotation) is typing.Annotated:
        return (typing.get_args(annotation)[0],)
    return (annotation,)


def _normalise(
    document: Mapping[str, Any], section: type[BaseModel], prefix: str, issues: list[ConfigIssue]
) -> dict[str, Any]:
    """Prepare a document for pydantic: make a list of a single word where a list is expected,
    expand paths, and refuse true and false as numbers."""
    result: dict[str, Any] = {}
    for name, value in document.items():
        key = f"{prefix}{name}"
        field = section.model_fields.get(name) if isinstance(name, str) else None
        if not isinstance(name, str):
            issues.append(ConfigIssue(key, value, "a key must be a word", "quote it or correct it"))
            continue
        if field is None:
            result[name] = value
            continue
        inner, options = _section_of(field.annotation), _options(field.annotation)
        if inner is not None and isinstance(value, Mapping):
            # keys not set keep the field's default (critic.optim.lr), not the section class's
            default = field.default
            is_section = isinstance(default, BaseModel)
            defaults = default.model_dump(exclude_unset=True) if is_section else {}
            merged = merge_documents(defaults, value)
            result[name] = _normalise(merged, inner, f"{key}.", issues)
            continue
        number = bool not in options and any(o in (int, float) for o in options)
        if isinstance(value, bool) and number:
            issues.append(
                ConfigIssue(key, value, "is true or false, not a number", "give a number")
            )
            continue
        if isinstance(value, str) and any(map(_is_tuple, options)):
            value = [value]
        items = _sections_in(field.annotation)
        if items is not None and isinstance(value, list):
            value = [
                _normalise(item, items, f"{key}.{index}.", issues)
                if isinstance(item, Mapping)
                else item
                for index, item in enumerate(value)
            ]
        result[name] = _expand(value) if _any_index(key) in PATH_KEYS else value
    return result


def _any_index(key: str) -> str:
    """A key with ``*`` for every index of a list."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", key)


def _expand(value: Any) -> Any:
    if isinstance(value, list):
        return [_expand(item) for item in value]
    if isinstance(value, str):
        return os.path.expanduser(os.path.expandvars(value))
    return value


def _is_branch(part: str | int) -> bool:
    """Whether a part of pydantic's error location is a branch of a union instead of a key."""
    branches = {"bool", "int", "float", "str", "constrained-int", "constrained-float",
                Offload.__name__}  # fmt: skip
    return isinstance(part, str) and ("[" in part or part in branches)


def _drop(document: dict[Any, Any], location: Sequence[str | int]) -> None:
    """Remove a key; for an error in an entry of a list or mapping, the key that holds it."""
    for part in location[:-1]:
        inner = document.get(part) if isinstance(part, str) else None
        if not isinstance(inner, dict):
            document.pop(part, None)
            return
        document = inner
    document.pop(location[-1], None)


_TYPE_FIXES = {
    "int": "give an integer",
    "float": "give a number",
    "bool": "give true or false",
    "string": "give text (in quotes if YAML would read it as a number, true, false or null)",
    "tuple": "give a list",
    "dict": "give key: value pairs",
    "finite": "give a finite number",
}


def _explain(entry: Mapping[str, Any], parts: Sequence[str | int]) -> tuple[str, str]:
    kind, context = entry["type"], entry.get("ctx", {})
    if kind == "extra_forbidden":
        return "no such key", _fix_unknown(parts)
    if kind == "literal_error":
        options = context["expected"].replace("'", "").replace(" or ", ", ")
        options = options.replace("True", "true").replace("False", "false")
        close = nearest(str(entry["input"]), options.split(", "))
        hint = f"did you mean {close}? " if close else ""
        return "is not one of the choices", f"{hint}choose one of: {options}"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        bound = next(iter(context.values()))
        sign = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<"}.get(kind, "<=")
        return "is out of range", f"give a value {sign} {bound}"
    if kind == "missing" and isinstance(parts[-1], str):
        return "field required", "it has no default: give it"
    if kind in ("too_short", "too_long", "missing"):
        return entry["msg"][0].lower() + entry["msg"][1:], "give exactly that many entries"
    if kind == "model_type":
        return "is a section, not a value", "give its keys, as key: value pairs"
    stem = kind.split("_")[0]
    return entry["msg"][0].lower() + entry["msg"][1:], _TYPE_FIXES.get(stem, "correct the value")


def _fix_unknown(parts: Sequence[str | int]) -> str:
    """The fix for an unknown key: its right place, the program that translates it, the nearest
    name, or all keys of the section."""
    name = str(parts[-1])
    key = _any_index(".".join(str(part) for part in parts))
    known = recipe_keys()
    section = key.rpartition(".")[0]
    sections = {k.rpartition(".")[0] for k in known} - {""}
    siblings = {k[len(section) + 1 :].split(".")[0] for k in known if k.startswith(f"{section}.")}
    tops = {s.split(".")[0] for s in sections}
    elsewhere = [k for k in known if k.rpartition(".")[2] == name]
    if elsewhere:
        return f"write {' or '.join(elsewhere[:4])}"
    if system := system_of(name):
        command = f"mppo-migrate {system} < run.sh > recipe.yaml"
        return f"translate the command of {system}: {command} (pip install ./extras/migrate)"
    close = nearest(name, siblings if section else tops)
    if close:
        return f"did you mean {section + '.' if section else ''}{close}?"
    close = nearest(name, {k.rpartition(".")[2] for k in known})
    if close:
        full = [k for k in known if k.rpartition(".")[2] == close]
        return f"did you mean {' or '.join(full[:4])}?"
    return f"keys here: {', '.join(sorted(siblings if section else tops))}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the JSON schema of a recipe file."""
    parser = argparse.ArgumentParser(prog="python -m mppo.recipe.load", description=main.__doc__)
    parser.add_argument("--json-schema", action="store_true", required=True)
    parser.parse_args(argv)
    print(json.dumps(json_schema(), indent=2, sort_keys=True))


if __name__ == "__main__":
    main()

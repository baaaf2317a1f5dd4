"""Recipe file and overrides to a frozen, validated ``Recipe``.

``python -m mppo.config.load --json-schema`` prints the schema that editors complete and check
recipes with.
"""

from __future__ import annotations

import argparse
import json
import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from mppo.config.document import BASE_KEY, apply_overrides, merge_documents, read_document
from mppo.config.errors import ConfigError, ConfigIssue, nearest
from mppo.config.presets import apply_preset
from mppo.config.schema import Recipe
from mppo.config.verl.keys import Settled
from mppo.config.verl.names import ours
from mppo.safety.redact import redact

PATH_KEYS = frozenset(
    {
        "model.path", "model.tokenizer_path", "critic.path", "ref.path",
        "data.train_files", "data.val_files", "trainer.default_local_dir",
    }
)  # fmt: skip
"""Keys in whose values ``~`` and ``$VARIABLE`` are expanded."""


def load_recipe(path: str | Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge and validate a recipe.

    Args:
        path: YAML file; None starts from the defaults.
        overrides: ``section.key=value`` settings, later ones winning.

    Returns:
        The recipe.

    Raises:
        ConfigError: names every issue at once.
    """
    recipe, issues = read_recipe(path, overrides)
    if recipe is None or issues:
        raise ConfigError(issues, source=source_name(path))
    return recipe


def source_name(path: str | Path | None) -> str:
    """How a recipe is called in messages."""
    return f"recipe {path}" if path is not None else "recipe (defaults and command line)"


def read_recipe(
    path: str | Path | None, overrides: Sequence[str] = (), remarks: list[str] | None = None
) -> tuple[Recipe | None, list[ConfigIssue]]:
    """As ``load_recipe``, with the issues as values.

    Args:
        path, overrides: as there.
        remarks: gets what the log should say about keys that are taken otherwise than written.

    Returns:
        The recipe with faulty keys at their defaults (None where no recipe can be made of it) and
        the issues, none where all is well.
    """
    issues: list[ConfigIssue] = []
    document: dict[str, Any] = {}
    if path is not None:
        document, issues = read_document(Path(path))
        if not document and issues:
            return None, issues
    document, override_issues = apply_overrides(document, overrides)
    issues += override_issues
    settled = Settled(document)
    issues += settled.issues
    if remarks is not None:
        remarks += [*given_twice(overrides), *settled.remarks]
    document = _normalise(apply_preset(settled.document), Recipe, "", issues)
    try:
        return Recipe.model_validate(document), issues
    except ValidationError as error:
        issues += translate(error)
        for entry in error.errors():
            _drop(document, entry["loc"])
    try:
        return Recipe.model_validate(document), issues
    except ValidationError:
        return None, issues


def given_twice(overrides: Sequence[str]) -> list[str]:
    """A line for every key that the command line gives two values."""
    given: dict[str, str] = {}
    lines = []
    for override in overrides:
        written, _, value = override.lstrip("+").partition("=")
        key = ours(written.strip())
        if given.setdefault(key, value) != value:
            lines.append(f"{key} is given twice: {given[key]}, then {value}; the last counts")
            given[key] = value
    return lines


def translate(error: ValidationError) -> list[ConfigIssue]:
    """pydantic's findings in the words of a recipe, one issue per key."""
    issues: dict[str, ConfigIssue] = {}
    for entry in error.errors():
        parts = [part for part in entry["loc"] if not _is_branch(part)]
        key = ".".join(str(part) for part in parts)
        if key not in issues:
            why, fix = _explain(entry, parts)
            issues[key] = ConfigIssue(key, entry["input"], why, fix)
    return list(issues.values())


def recipe_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, sections left out."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        inner = _section_of(field.annotation)
        keys += recipe_keys(inner, f"{prefix}{name}.") if inner else [prefix + name]
    return keys


def resolved_yaml(recipe: Recipe) -> str:
    """The whole recipe with every default, as YAML; it loads back to the same recipe but for
    secrets."""
    plain = redact(recipe.model_dump(mode="json"))
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def json_schema() -> dict[str, Any]:
    """JSON schema of a recipe file, for editors."""
    schema = Recipe.model_json_schema()
    schema["title"] = "mppo recipe"
    schema["properties"][BASE_KEY] = {
        "description": "Recipe file or files to start from, relative to this file.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    return schema


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section a field holds, ``Section | None`` included."""
    options = _options(annotation)
    sections = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
    return sections[0] if sections else None


def _options(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _normalise(
    document: Mapping[str, Any], section: type[BaseModel], prefix: str, issues: list[ConfigIssue]
) -> dict[str, Any]:
    """Wrap a lone word where a list is meant, expand paths, and refuse true/false as a number."""
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
            # a section set in part keeps the rest of its own default, not of its class's
            under = field.default.model_dump(exclude_unset=True) if field.default else {}
            result[name] = _normalise(merge_documents(under, value), inner, f"{key}.", issues)
            continue
        number = bool not in options and any(o in (int, float) for o in options)
        if isinstance(value, bool) and number:
            issues.append(
                ConfigIssue(key, value, "is true or false, not a number", "give a number")
            )
            continue
        if isinstance(value, str) and any(typing.get_origin(o) is tuple for o in options):
            value = [value]
        result[name] = _expand(value) if key in PATH_KEYS else value
    return result


def _expand(value: Any) -> Any:
    if isinstance(value, list):
        return [_expand(item) for item in value]
    if isinstance(value, str):
        return os.path.expanduser(os.path.expandvars(value))
    return value


def _is_branch(part: str | int) -> bool:
    """Whether a part of pydantic's location names a branch of a union, not a key."""
    return isinstance(part, str) and ("[" in part or part in {"bool", "int", "float", "str"})


def _drop(document: dict[str, Any], location: Sequence[str | int]) -> None:
    """Remove a faulty key (the whole list, for an entry of a list)."""
    for part in location[:-1]:
        inner = document.get(part) if isinstance(part, str) else None
        if not isinstance(inner, dict):
            document.pop(part, None)
            return
        document = inner
    document.pop(location[-1], None)


_TYPE_CURES = {
    "int": "give a whole number",
    "float": "give a number",
    "bool": "give true or false",
    "string": "give text (quote it where YAML reads it otherwise)",
    "tuple": "give a list",
    "dict": "give key: value pairs",
    "model": "write the section's keys below it",
    "finite": "give a finite number",
}


def _explain(entry: Mapping[str, Any], parts: Sequence[str | int]) -> tuple[str, str]:
    """Why and fix for one finding of pydantic."""
    kind, context = entry["type"], entry.get("ctx", {})
    if kind == "extra_forbidden":
        return "no such key", _fix_unknown(parts)
    if kind == "literal_error":
        options = context["expected"].replace("'", "").replace(" or ", ", ")
        close = nearest(str(entry["input"]), options.split(", "))
        hint = f"did you mean {close}? " if close else ""
        return "no such choice", f"{hint}choose one of: {options}"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        bound = next(iter(context.values()))
        sign = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<"}.get(kind, "<=")
        return "is out of range", f"give a value {sign} {bound}"
    if kind in ("too_short", "too_long", "missing"):
        return entry["msg"][0].lower() + entry["msg"][1:], "give exactly the entries named"
    stem = kind.split("_")[0]
    return entry["msg"][0].lower() + entry["msg"][1:], _TYPE_CURES.get(stem, "correct the value")


def _fix_unknown(parts: Sequence[str | int]) -> str:
    """What to do about a key that does not exist."""
    name = str(parts[-1])
    key = ".".join(str(part) for part in parts)
    known = recipe_keys()
    section = key.rpartition(".")[0]
    sections = {k.rpartition(".")[0] for k in known} - {""}
    same = {k[len(section) + 1 :].split(".")[0] for k in known if k.startswith(f"{section}.")}
    tops = {s.split(".")[0] for s in sections}
    elsewhere = [k for k in known if k.rpartition(".")[2] == name]
    if elsewhere:
        return f"this key lives at {' or '.join(elsewhere[:4])}"
    close = nearest(name, same if section else tops)
    if close:
        return f"did you mean {section + '.' if section else ''}{close}?"
    close = nearest(name, {k.rpartition(".")[2] for k in known})
    if close:
        full = [k for k in known if k.rpartition(".")[2] == close]
        return f"did you mean {' or '.join(full[:4])}?"
    return f"keys here: {', '.join(sorted(same if section else tops))}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the JSON schema of a recipe."""
    parser = argparse.ArgumentParser(prog="python -m mppo.config.load", description=main.__doc__)
    parser.add_argument("--json-schema", action="store_true", required=True)
    parser.parse_args(argv)
    print(json.dumps(json_schema(), indent=2, sort_keys=True))


if __name__ == "__main__":
    main()

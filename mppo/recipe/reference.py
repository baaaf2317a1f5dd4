"""The reference of all recipe keys as Markdown, from the texts of the fields themselves.

``python -m mppo.recipe.reference`` prints it. ``docs/recipe_reference.md`` is a copy that
``make schema`` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mppo.recipe.load import json_schema

_TITLE = """# All recipe keys

Generated from `mppo/recipe/sections/` by `make schema`. [Configuration](configuration.md) explains
how recipes are written and combined; [migrating](migrating.md) has the names of other programs.
"""
_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_REFERENCE = "#/$defs/"


def recipe_reference() -> str:
    """Markdown with one table per section: key, type, default and meaning of every field."""
    schema = json_schema()
    definitions, properties = schema["$defs"], schema["properties"]
    top = {key: field for key, field in properties.items() if not _section(field)}
    places: dict[str, dict[str, Mapping[str, Any]]] = {}
    for key, field in properties.items():
        for name, place, defaults in _sections(key, field, definitions):
            places.setdefault(name, {})[place] = defaults
    parts = [_TITLE, "## Top level", "", *_table(top, {})]
    for name, where in places.items():
        section = definitions[name]
        parts += ["", f"## {', '.join(where)}", "", _one_line(section["description"]), ""]
        parts += _table(section["properties"], where)
    return "\n".join(parts) + "\n"


def _section(field: Mapping[str, Any]) -> str | None:
    for option in (field, *field.get("anyOf", ()), field.get("items", {})):
        if "$ref" in option:
            return option["$ref"].removeprefix(_REFERENCE)
    return None


def _sections(
    place: str, field: Mapping[str, Any], definitions: Mapping[str, Any]
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Type, place and defaults of a key's section and of those inside it."""
    name = _section(field)
    if name is None:
        return
    place += "[]" if "items" in field else ""
    default = field.get("default")
    yield name, place, default if isinstance(default, Mapping) else {}
    for key, inner in definitions[name]["properties"].items():
        yield from _sections(f"{place}.{key}", inner, definitions)


def _table(
    fields: Mapping[str, Mapping[str, Any]], places: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """The keys of a section, whose defaults at its places may differ from the fields' own."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in fields.items():
        is_section = _section(field) and "items" not in field
        default = "" if is_section or "default" not in field else _default(key, field, places)
        cells = (f"`{key}`", _type(field), default, _one_line(field["description"]))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _default(key: str, field: Mapping[str, Any], places: Mapping[str, Mapping[str, Any]]) -> str:
    own = field["default"]
    others = {place: at[key] for place, at in places.items() if at.get(key, own) != own}
    shown = [f"{place}: {_value(value)}" for place, value in others.items()]
    if len(places) == 1:
        return _value(next(iter(others.values()), own))
    return "; ".join([_value(own), *shown])


def _value(value: object) -> str:
    return f"`{json.dumps(value)}`"


def _type(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type(option) for option in field["anyOf"])
    if "$ref" in field:
        return "section"
    if "enum" in field or "const" in field:
        values = field.get("enum", [field.get("const")])
        return ", ".join(f"`{v}`" if isinstance(v, str) else _value(v) for v in values)
    kind = field.get("type", "any")
    if kind == "array":
        return f"list of {_type(field['items'])}" if field.get("items") else "list"
    limits = [f"{sign} {_number(field[name])}" for name, sign in _LIMITS.items() if name in field]
    return f"{kind} {' and '.join(limits)}".strip()


def _number(limit: float) -> str:
    """A limit, whole numbers with all their digits."""
    return f"{limit:.0f}" if limit == int(limit) else f"{limit:g}"


def _one_line(text: str) -> str:
    """A docstring for a table's cell: one line, code in single quotes of Markdown."""
    return " ".join(text.split()).replace("``", "`")


if __name__ == "__main__":
    print(recipe_reference(), end="")

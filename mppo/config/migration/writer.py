"""Write a migration as a recipe: YAML with a comment for each flag that is not in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mppo.config.errors import printable
from mppo.config.migration.migration import Migration, flow
from mppo.config.migration.row import Setting
from mppo.config.schema import Recipe
from mppo.safety.redact import redact_text

_COMMENT_COLUMN = 50


def recipe_text(result: Migration, title: str) -> str:
    """The recipe's YAML.

    Args:
        result: the migration.
        title: the system that the command is for.
    """
    lines = [
        f"# {title}'s {result.program}, written by mppo-migrate. See what the run needs:",
        "#   python mppo/train.py --dry-run --config THIS_FILE",
    ]
    for heading, entries in (
        ("To check:", result.checks),
        ("Not recognised, or refused:", result.unknown),
        ("No counterpart, or none needed:", result.without),
    ):
        if entries:
            lines += ["#", f"# {heading}", *(f"#   {entry}" for entry in entries)]
    lines += _section(_tree(result.settings.values()), 0)
    return "\n".join(_safe(line) for line in lines) + "\n"


def _safe(line: str) -> str:
    """The line without secrets, and without characters that would end a comment."""
    return printable(redact_text(line).replace("\n", " ").replace("\r", " "))


def _tree(settings: Sequence[Setting] | Any) -> dict[str, Any]:
    """The settings as nested mappings, sections in the schema's order."""
    tree: dict[str, Any] = {}
    order = list(Recipe.model_fields)
    by_section = sorted(
        settings, key=lambda s: order.index(top) if (top := s.key.split(".")[0]) in order else -1
    )
    for setting in by_section:
        *sections, last = setting.key.split(".")
        inner = tree
        for name in sections:
            inner = inner.setdefault(name, {})
        inner[last] = setting
    return tree


def _section(tree: dict[str, Any], depth: int) -> Iterator[str]:
    for name, entry in tree.items():
        head = f"{'  ' * depth}{flow(name)}:"
        if isinstance(entry, Setting):
            line = f"{head} {flow(entry.value)}"
            yield f"{line:<{_COMMENT_COLUMN}}  # {entry.origin}" if entry.origin else line
        else:
            yield head
            yield from _section(entry, depth + 1)

"""Write a migration as a recipe: YAML with a comment for each flag that is not in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mppo.recipe.document import inline_yaml, parse_yaml
from mppo.recipe.schema import Recipe
from mppo.safety.foreign_text import visible
from mppo.safety.redact import redact, redact_text
from mppo_migrate.migration import Migration
from mppo_migrate.row import Setting

_COMMENT_COLUMN = 50


def recipe_text(result: Migration, title: str) -> str:
    """The recipe's YAML, without secrets.

    Args:
        result: the migration.
        title: the system that the command is for.

    Raises:
        ValueError: the text would not be read as the migration's settings.
    """
    comments = [
        f"{title}'s {result.program}, written by mppo-migrate. See what the run needs:",
        "  python mppo/train.py --dry-run --config THIS_FILE",
        *_start(result),
    ]
    for heading, entries in (
        ("To check:", result.checks),
        ("Not recognised, or refused:", result.unknown),
        ("No counterpart, or none needed:", result.without),
    ):
        if entries:
            comments += ["", heading, *(f"  {entry}" for entry in entries)]
    tree = _tree(result.settings.values())
    lines = [f"# {visible(comment)}".rstrip() for comment in comments] + list(_section(tree, 0))
    text = "".join(f"{redact_text(line)}\n" for line in lines)
    # a value of the command must never become a setting that it does not name
    meant = redact(_values(tree))
    if repr(parse_yaml(text) or {}) != repr(meant):
        raise ValueError("its values cannot be written as a recipe: remove unprintable characters")
    return text


def _start(result: Migration) -> Iterator[str]:
    """The command that starts the run on its nodes and GPUs."""
    sizes = [result.settings.get(f"trainer.{key}") for key in ("nnodes", "n_gpus_per_node")]
    nodes, ranks = (1 if size is None else size.value for size in sizes)
    apart = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
    yield "Start it:" if nodes == 1 else "Start it, on every node:"
    launch = f"torchrun {'' if nodes == 1 else apart}--nproc-per-node {ranks}"
    yield f"  {launch} mppo/train.py --config THIS_FILE"


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


def _values(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        name: entry.value if isinstance(entry, Setting) else _values(entry)
        for name, entry in tree.items()
    }


def _section(tree: dict[str, Any], depth: int) -> Iterator[str]:
    for name, entry in tree.items():
        head = f"{'  ' * depth}{inline_yaml(name)}:"
        if isinstance(entry, Setting):
            value = redact({name: entry.value})[name]
            line = f"{head} {inline_yaml(value)}"
            comment = f"  # {visible(entry.origin)}" if entry.origin else ""
            yield f"{line:<{_COMMENT_COLUMN}}{comment}" if comment else line
        else:
            yield head
            yield from _section(entry, depth + 1)

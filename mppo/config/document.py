"""A recipe as read: YAML text and ``key=value`` overrides to one nested mapping.

YAML here follows version 1.2 for scalars: ``off`` and ``no`` are words, ``1e-6`` is a number, a
date stays text. A key given twice is a issue.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mppo.config.errors import ConfigIssue
from mppo.config.verl.names import RENAMED
from mppo.safety.input_files import MAX_DEPTH, read_text

MAX_BYTES, MAX_NODES, MAX_DIGITS, MAX_BASES = 1 << 20, 100_000, 30, 20
"""Of a recipe: bytes of a file, values with all aliases written out, digits of a whole number, and
files that build on each other."""
_TAGS = frozenset(
    f"tag:yaml.org,2002:{kind}"
    for kind in ("str", "int", "float", "bool", "null", "merge", "seq", "map")
)
_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
BASE_KEY = "base"
"""Top-level key naming a recipe (or several) to start from, relative to the file it stands in."""


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalar rules of YAML 1.2, without repeated keys, bounded in size."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 (PyYAML's own attribute)
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._depth == MAX_DEPTH:
            raise _bad_node(self.peek_event(), _TOO_DEEP)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _measure(node, {}, set())
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise _bad_node(key_node, f"a {key_node.id} is no key")
            if key_node.value in seen:
                raise _bad_node(key_node, f"key {key_node.value!r} stands twice")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _measure(
    node: yaml.Node, known: dict[int, tuple[int, int]], above: set[int]
) -> tuple[int, int]:
    """Nodes and levels below a node, every alias written out.

    Args:
        node: to be measured; its scalars are checked, too.
        known: what was measured before, by identity.
        above: nodes that led here.
    """
    if id(node) in above:
        raise _bad_node(node, "it refers to itself")
    if id(node) in known:
        return known[id(node)]
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node)
        return 1, 1
    if len(above) == MAX_DEPTH:
        raise _bad_node(node, _TOO_DEEP)
    if node.tag not in _TAGS:
        raise _bad_node(node, f"the tag {node.tag} is not known here")
    pairs = isinstance(node, yaml.MappingNode)
    inner = [child for pair in node.value for child in pair] if pairs else node.value
    above.add(id(node))
    found = [_measure(child, known, above) for child in inner]
    above.remove(id(node))
    size = 1 + sum(nodes for nodes, _ in found)
    depth = 1 + max((levels for _, levels in found), default=0)
    if depth > MAX_DEPTH or size > MAX_NODES:
        raise _bad_node(node, _TOO_DEEP if depth > MAX_DEPTH else f"it has over {MAX_NODES} values")
    known[id(node)] = size, depth
    return size, depth


def _check_scalar(node: yaml.ScalarNode) -> None:
    if node.tag not in _TAGS:
        raise _bad_node(node, f"the tag {node.tag} is not known here")
    if node.tag.endswith(":int") and len(node.value) > MAX_DIGITS:
        raise _bad_node(node, f"a whole number of {len(node.value)} digits")
    if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in node.value):
        raise _bad_node(node, "a character that no text has (NUL, or half a surrogate pair)")


def _bad_node(node: Any, why: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, why, node.start_mark)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)"
        r"|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first)
    )


def parse_yaml(text: str) -> Any:
    """Parse YAML text in bounded time and memory. Raises ``yaml.YAMLError``."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, KeyError, AttributeError) as error:  # of a value that its tag does not fit
        raise yaml.YAMLError(f"a value is not what its tag says ({error})") from error


def merge_documents(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid on ``under``, mapping by mapping; neither is changed."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = merge_documents(below, value) if both else value
    return merged


def read_document(path: Path) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Read a recipe file with everything it builds on.

    Args:
        path: the YAML file.

    Returns:
        The merged mapping (empty where the file cannot be read) and the issues.
    """
    return _read_document(path, (), {})


def _read_document(
    path: Path, above: tuple[Path, ...], known: dict[Path, dict[str, Any]]
) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """``above``: files that led here through ``base``; ``known``: what was read before, and its
    issues told."""
    where = Path(os.path.realpath(path))
    if where in above or len(above) == MAX_BASES:
        chain = " -> ".join(str(p) for p in (*above, where)[-4:])
        return {}, [
            ConfigIssue(BASE_KEY, str(path), f"recipes build on each other: {chain}", "cut it")
        ]
    if where in known:
        return known[where], []
    document, issues = _parse_document(path)
    bases = document.pop(BASE_KEY, None) or []
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return document, [
            ConfigIssue(BASE_KEY, bases, "is no file name", "name one YAML file, or a list")
        ]
    merged: dict[str, Any] = {}
    for name in names:
        part, part_issues = _read_document(path.parent / name, (*above, where), known)
        merged = merge_documents(merged, part)
        issues += part_issues
    known[where] = merge_documents(merged, rename_keys(document, issues))
    return known[where], issues


def _parse_document(path: Path) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """The mapping in one file; empty, and a issue, where there is none."""
    try:
        text = read_text(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        return {}, [
            ConfigIssue("--config", str(path), f"cannot be read: {error}", "give a YAML file")
        ]
    try:
        document = parse_yaml(text)
    except yaml.YAMLError as error:
        return {}, [
            ConfigIssue("--config", str(path), f"is no valid YAML: {_one_line(error)}", "fix it")
        ]
    if document is None:
        document = {}
    if not isinstance(document, dict):
        why = f"holds a {type(document).__name__}, not a mapping of sections"
        return {}, [
            ConfigIssue("--config", str(path), why, "write sections such as 'model:', 'data:'")
        ]
    return document, []


def apply_overrides(
    document: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Lay ``section.key=value`` settings on a document, later ones winning.

    Values are YAML: ``actor.optim.lr=1e-6``, ``data.train_files=[a.jsonl, b.jsonl]``. Hydra's
    leading ``+`` is accepted.

    Returns:
        The new mapping and the issues.
    """
    merged = dict(document)
    issues: list[ConfigIssue] = []
    for override in overrides:
        key, equals, text = override.lstrip("+").partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts) or len(parts) > MAX_DEPTH:
            fix = "write section.key=value, such as actor.optim.lr=1e-6"
            issues.append(ConfigIssue("command line", override, "is no setting", fix))
            continue
        try:
            value = parse_yaml(text)
        except yaml.YAMLError as error:
            why = f"its value is no valid YAML: {_one_line(error)}"
            issues.append(ConfigIssue(key, text, why, "quote the value, or close its brackets"))
            continue
        for part in reversed(parts):
            value = {part: value}
        merged = merge_documents(merged, rename_keys(value, issues))
    return merged, issues


def rename_keys(document: Mapping[str, Any], issues: list[ConfigIssue]) -> dict[str, Any]:
    """Bring verl's long names to ours.

    Args:
        document: nested mapping; not changed.
        issues: gets one issue for every key given under both names with different values.

    Returns:
        A new mapping with our names only.
    """
    renamed = merge_documents({}, document)
    for old, new in RENAMED.items():
        found, value = _pop(renamed, old.split("."))
        if not found:
            continue
        there, present = _get(renamed, new.split("."))
        if there and not isinstance(present, Mapping) and present != value:
            why = f"also given as {new} = {present!r}"
            issues.append(ConfigIssue(old, value, why, f"keep {new} only"))
            continue
        for part in reversed(new.split(".")):
            value = {part: value}
        renamed = merge_documents(renamed, value)
    return renamed


def _get(document: Any, parts: Sequence[str]) -> tuple[bool, Any]:
    for part in parts:
        if not isinstance(document, Mapping) or part not in document:
            return False, None
        document = document[part]
    return True, document


def _pop(document: dict[str, Any], parts: Sequence[str]) -> tuple[bool, Any]:
    """Take a key out, and the sections this leaves empty. Replaces mappings on the way."""
    head, *rest = parts
    if head not in document:
        return False, None
    if not rest:
        return True, document.pop(head)
    if not isinstance(document[head], Mapping):
        return False, None
    inner = dict(document[head])
    found, value = _pop(inner, rest)
    if found:
        document[head] = inner
        if not inner:
            del document[head]
    return found, value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

"""Read YAML files and ``key=value`` overrides into one nested mapping, and write YAML.

Scalars follow YAML 1.2: ``off`` and ``no`` are words, ``1e-6`` is a number, a date is text. A key
that is given twice is an error. In what is written, every character that is not printable
(controls, separators, marks of direction) is an escape in double quotes, so that a reader sees all
that a program reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mppo.recipe.errors import ConfigIssue
from mppo.recipe.other_systems import RENAMED, canonical_key
from mppo.safety.input_files import MAX_DEPTH, read_text

MAX_BYTES, MAX_NODES, MAX_DIGITS, MAX_BASES = 1 << 20, 100_000, 30, 20
"""Limits of a recipe: bytes of a file, values after aliases are expanded, digits of an integer, and
files in a chain of ``base`` keys."""
_TAGS = frozenset(
    f"tag:yaml.org,2002:{kind}"
    for kind in ("str", "int", "float", "bool", "null", "merge", "seq", "map")
)
_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
BASE_KEY = "base"
"""Top-level key: the recipe or recipes that a file starts from, relative to the file."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2 scalars and limits on size; refuses repeated keys."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 (PyYAML's own attribute)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._depth == MAX_DEPTH:
            raise _bad_node(self.peek_event(), _TOO_DEEP)
        self._depth += 1
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._depth -= 1
        assert node is not None
        if not is_alias:
            self._sizes[node] = self._size(node)
        elif node not in self._sizes:
            raise _bad_node(node, "it refers to itself")
        return node

    def _size(self, node: yaml.Node) -> tuple[int, int]:
        """Check a node, and return the nodes and levels from it down.

        An alias counts as the node that it names: a small file with nested aliases expands to
        billions of values.
        """
        if node.tag not in _TAGS:
            raise _bad_node(node, f"the tag {node.tag} is not supported")
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(node)
            return 1, 1
        inner = node.value
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
            inner = [child for pair in node.value for child in pair]
        size = 1 + sum(self._sizes[child][0] for child in inner)
        depth = 1 + max((self._sizes[child][1] for child in inner), default=0)
        if depth > MAX_DEPTH:
            raise _bad_node(node, _TOO_DEEP)
        if size > MAX_NODES:
            raise _bad_node(node, f"it has over {MAX_NODES} values")
        return size, depth


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if key.tag.endswith(":merge"):
            continue
        if not isinstance(key, yaml.ScalarNode):
            raise _bad_node(key, f"a {key.id} cannot be a key")
        if key.value in seen:
            raise _bad_node(key, f"key {key.value!r} is given twice")
        seen.add(key.value)


def _check_scalar(node: yaml.ScalarNode) -> None:
    if node.tag.endswith(":int") and len(node.value) > MAX_DIGITS:
        raise _bad_node(node, f"an integer of {len(node.value)} digits (at most {MAX_DIGITS})")
    if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in node.value):
        raise _bad_node(
            node, "a character that is not valid in text (NUL, or half a surrogate pair)"
        )


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
    except (ValueError, KeyError, AttributeError) as error:  # raised for a value unlike its tag
        raise yaml.YAMLError(f"a value does not match its tag ({error})") from error


def leaves(document: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every entry that is not a section."""
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def merge_documents(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A new document with the values of ``over`` where given, else of ``under``; mappings that both
    have are merged."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[key] = merge_documents(below, value)
        else:
            merged[key] = value
    return merged


def read_document(path: Path) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Read a recipe file and the files of its ``base`` keys: the merged mapping (empty if the file
    cannot be read) and the issues."""
    return _read_document(path, (), {})


def document_of(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """As ``read_document``, for a mapping that a program made; its ``base`` is relative to the
    working directory."""
    return _with_bases(_plain(content), Path(), (), {})


def _plain(value: Any) -> Any:
    """A program's values as YAML has them: paths are texts, numbers of numpy Python's."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _read_document(
    path: Path, chain: tuple[Path, ...], done: dict[Path, dict[str, Any]]
) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """One file of a tree, at the end of a chain in which each is a ``base`` of the one before.
    ``done``: files that were read before and whose issues are already reported."""
    where = Path(os.path.realpath(path))
    if where in chain or len(chain) == MAX_BASES:
        shown = " -> ".join(str(p) for p in (*chain, where)[-4:])
        why = f"recipes name each other as base, or over {MAX_BASES} in a row: {shown}"
        return {}, [ConfigIssue(BASE_KEY, str(path), why, "remove one of these base keys")]
    if where in done:
        return done[where], []
    document, issues = _parse_document(path)
    done[where], base_issues = _with_bases(document, path.parent, (*chain, where), done)
    return done[where], issues + base_issues


def _with_bases(
    document: dict[str, Any],
    folder: Path,
    chain: tuple[Path, ...],
    done: dict[Path, dict[str, Any]],
) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """A document over those of its ``base`` key, whose files are relative to a folder."""
    bases = document.pop(BASE_KEY, None) or []
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return document, [
            ConfigIssue(BASE_KEY, bases, "is not a file name", "name one YAML file, or a list")
        ]
    merged: dict[str, Any] = {}
    issues: list[ConfigIssue] = []
    for name in names:
        part, part_issues = _read_document(folder / name, chain, done)
        merged = merge_documents(merged, part)
        issues += part_issues
    return merge_documents(merged, rename_keys(document, issues)), issues


def _parse_document(path: Path) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """The mapping in one file; an empty one and an issue if the file does not hold a mapping."""
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
            ConfigIssue(
                "--config", str(path), f"is not valid YAML: {_one_line(error)}", _fix(error)
            )
        ]
    if document is None:
        document = {}
    if not isinstance(document, dict):
        why = f"holds a value of type {type(document).__name__}, not a mapping of sections"
        return {}, [
            ConfigIssue("--config", str(path), why, "write sections such as 'model:', 'data:'")
        ]
    return document, []


def apply_overrides(
    document: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Apply ``section.key=value`` settings to a document; later ones win.

    Values are YAML: ``actor.optim.lr=1e-6``, ``data.train_files=[a.jsonl, b.jsonl]``. An empty
    mapping, ``rollout.server_args={}``, takes the place of the mapping that the document has;
    ``~rollout.server_args`` removes a key. Hydra's leading ``+`` is accepted.
    """
    merged = dict(document)
    issues: list[ConfigIssue] = []
    for override in overrides:
        if override.startswith("~"):
            issues += _remove(merged, override[1:])
            continue
        key, equals, text = override.lstrip("+").partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts) or len(parts) > MAX_DEPTH:
            fix = "write section.key=value, such as actor.optim.lr=1e-6, without spaces"
            if override.endswith((".yaml", ".yml", ".json")):
                fix = f"write --config {override} if it is the recipe"
            issues.append(ConfigIssue("command line", override, "is not a setting", fix))
            continue
        try:
            value = parse_yaml(text)
        except yaml.YAMLError as error:
            why = f"its value is not valid YAML: {_one_line(error)}"
            issues.append(ConfigIssue(key, text, why, "quote the value, or close its brackets"))
            continue
        if value == {}:
            _pop(merged, canonical_key(key.strip()).split("."))
        for part in reversed(parts):
            value = {part: value}
        merged = merge_documents(merged, rename_keys(value, issues))
    return merged, issues


def _remove(document: dict[str, Any], key: str) -> list[ConfigIssue]:
    """Remove a key from a document, whichever of its names is given."""
    found, _ = _pop(document, canonical_key(key.strip()).split("."))
    if found:
        return []
    why, fix = "nothing sets this key", "leave the argument out, or correct the key"
    return [ConfigIssue("command line", f"~{key}", why, fix)]


def rename_keys(document: Mapping[str, Any], issues: list[ConfigIssue]) -> dict[str, Any]:
    """Replace verl's names of keys and sections by mppo's (``RENAMED``), in a new mapping;
    ``issues`` receives one issue for every key given under both names with different values."""
    renamed = merge_documents({}, document)
    for old, new in RENAMED.items():
        found, value = _pop(renamed, old.split("."))
        if not found:
            continue
        already_given, present = _get(renamed, new.split("."))
        if already_given and not isinstance(present, Mapping) and present != value:
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
    """Remove a key, and sections that become empty; copies the mappings on the path. Returns
    whether the key was there, and its value."""
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
    return " ".join(str(error).split()).replace('in "<unicode string>", line', "at line")


def _fix(error: yaml.YAMLError) -> str:
    return "indent by spaces, not tabs" if "'\\t'" in str(error) else "correct that line"


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper; it quotes texts that would be other values in YAML 1.1 or 1.2."""


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    style = None if value.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style)


_Dumper.add_representer(str, _text)
_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()), *rows]
    for first, rows in (
        dict.fromkeys(yaml.SafeDumper.yaml_implicit_resolvers, ()) | _Loader.yaml_implicit_resolvers
    ).items()
}


def inline_yaml(value: Any) -> str:
    """A value as YAML on one line."""
    text = _dump(value, flow=True, width=1 << 30)
    return text.removesuffix("\n").removesuffix("\n...")


def block_yaml(value: Any) -> str:
    """A value as YAML, an entry per line, in its own order."""
    return _dump(value, flow=False, width=80)


def _dump(value: Any, flow: bool, width: int) -> str:
    def dump(allow_unicode: bool) -> str:
        return yaml.dump(
            value,
            Dumper=_Dumper,
            default_flow_style=flow,
            width=width,
            allow_unicode=allow_unicode,
            sort_keys=False,
        )

    text = dump(allow_unicode=True)
    # PyYAML leaves marks of direction and other unprintable characters as they are
    return text if text.replace("\n", "").isprintable() else dump(allow_unicode=False)

"""YAML text that ``mppo.config.document`` reads back as the same values.

Every character that is not printable (controls, separators, marks of direction) is written as an
escape in double quotes, so a reader sees all that a program reads.
"""

from __future__ import annotations

from typing import Any

import yaml

from mppo.config.document import implicit_resolvers


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper; it quotes texts that would be other values in YAML 1.1 or 1.2."""


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    style = None if value.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style)


_Dumper.add_representer(str, _text)
_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()), *rows]
    for first, rows in (
        dict.fromkeys(yaml.SafeDumper.yaml_implicit_resolvers, ()) | implicit_resolvers()
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

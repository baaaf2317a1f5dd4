"""The tables of presets in ``docs/algorithms.md``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mppo.recipe.presets import PAPERS, PRESETS, SYSTEMS, CopyOf, IfSet


def preset_table() -> str:
    """All presets as Markdown tables: keys by system and by paper, with the sources below."""
    return "\n\n".join(_table(list(presets)) for presets in (SYSTEMS, PAPERS))


def _table(names: Sequence[str]) -> str:
    rows = {
        name: {k: v for keys in PRESETS[name].values() for k, v in keys.items()} for name in names
    }
    keys = sorted({key for table in rows.values() for key in table})
    lines = ["| key | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for key in keys:
        cells = [_cell(rows[name][key]) if key in rows[name] else "" for name in names]
        lines.append(f"| `{key}` | " + " | ".join(cells) + " |")
    lines.append("")
    for name in names:
        for source, values in PRESETS[name].items():
            lines.append(f"- {name}, {source}: {', '.join(f'`{key}`' for key in values)}")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, CopyOf):
        times = "" if value.factor == 1.0 else f"{value.factor:g} x "
        return f"{times}`{value.key}`"
    if isinstance(value, IfSet):
        return f"{value.value} with `{value.key}`"
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)

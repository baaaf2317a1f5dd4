"""The tables of presets in ``docs/algorithms.md``."""

from __future__ import annotations

from collections.abc import Sequence

from mppo.config.presets import PAPERS, PRESETS, SYSTEMS, CopyOf, IfSet, PresetRow


def preset_table() -> str:
    """All presets as Markdown tables: keys by system and by paper, with the sources below."""
    return "\n\n".join(_table(list(presets)) for presets in (SYSTEMS, PAPERS))


def _table(names: Sequence[str]) -> str:
    rows = {name: {row.key: row for row in PRESETS[name]} for name in names}
    keys = sorted({key for table in rows.values() for key in table})
    lines = ["| key | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for key in keys:
        cells = [_cell(rows[name].get(key)) for name in names]
        lines.append(f"| `{key}` | " + " | ".join(cells) + " |")
    lines.append("")
    for name in names:
        for source in dict.fromkeys(row.source for row in PRESETS[name]):
            mine = [f"`{row.key}`" for row in PRESETS[name] if row.source == source]
            lines.append(f"- {name}, {source}: {', '.join(mine)}")
    return "\n".join(lines)


def _cell(row: PresetRow | None) -> str:
    if row is None:
        return ""
    if isinstance(row.value, CopyOf):
        times = "" if row.value.factor == 1.0 else f"{row.value.factor:g} x "
        return f"{times}`{row.value.key}`"
    if isinstance(row.value, IfSet):
        return f"{row.value.value} with `{row.value.key}`"
    if row.value is None:
        return "null"
    if isinstance(row.value, tuple):
        return f"[{', '.join(map(str, row.value))}]"
    return str(row.value).lower() if isinstance(row.value, bool) else str(row.value)

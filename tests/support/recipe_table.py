"""Write the tables of recipes into ``docs/recipes.md``: ``make recipes``."""

from __future__ import annotations

from pathlib import Path

from recipe_list import CPU_RECIPES, GPU_RECIPES, LABELS, header_of, simulated_recipes

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
BEGIN, END = "<!-- recipes: printed by make recipes -->\n", "<!-- end of recipes -->\n"
STATE = """
| recipe | fits 80 GB | simulated | its twin | run |
|---|---|---|---|---|
"""
SMALL = """
For CPUs:

| recipe | what | run |
|---|---|---|
"""


def page() -> str:
    """``docs/recipes.md`` with the tables of today."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{_tables()}\n{END}{after}"


def _tables() -> str:
    *sources, run = LABELS
    lines = [_row("recipe", "what", *map(str.lower, sources)), _row(*["---"] * (2 + len(sources)))]
    stands = simulated_recipes()
    states, small = "", ""
    for path in GPU_RECIPES:
        header = header_of(path)
        lines.append(
            _row(f"`{path.stem}`", header.title, *(header.labels[label] for label in sources))
        )
        name = path.stem
        simulated = "yes" if stands[name] == name else f"as `{stands[name]}`, an equal rank"
        states += _row(f"`{path.stem}`", "yes", simulated, "two steps", header.labels[run])
    for path in CPU_RECIPES:
        header = header_of(path)
        small += _row(f"`{path.stem}`", header.title, header.labels[run])
    return "".join(lines) + STATE + states + SMALL + small


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page())

"""Write the table of verl's flags into ``docs/migrating.md``: ``make verl-flags``."""

from __future__ import annotations

from pathlib import Path

from verl_flags.flags import (
    ACCEPTED,
    CONVERTED,
    IGNORED,
    OTHER_FLAGS,
    SCRIPT_FLAGS,
    Flag,
    translate_settings,
)

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
BEGIN, END = "<!-- verl's flags: printed by make verl-flags -->\n", "<!-- end of verl's flags -->\n"
HEAD = """Flags of verl's sixteen scripts `examples/ppo_trainer/run_*.sh`, and what becomes of each:

| verl | here |
|---|---|
"""
OTHERS = """
Flags of its other scripts for Megatron, and of its documentation:

| verl | here |
|---|---|
"""


def page() -> str:
    """``docs/migrating.md`` with the tables of today."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = HEAD + "".join(map(_row, SCRIPT_FLAGS)) + OTHERS + "".join(map(_row, OTHER_FLAGS))
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def _row(flag: Flag) -> str:
    removed = [*translate_settings([flag.setting]).removed]
    shown = flag.setting
    if flag.fate == ACCEPTED:
        shown = flag.name.lstrip("+")
        same = flag.words == shown.removeprefix("actor_rollout_ref.")
        reported = "the same" if same else f"`{flag.words}`"
    elif flag.fate == CONVERTED:
        reported = f"`{flag.words}`"
    elif flag.fate == IGNORED:
        reported = "no effect: " + removed[0].why
    else:
        fix = removed[0].fix
        reported = f"refused: {removed[0].why}. {fix[0].upper()}{fix[1:]}"
    cells = (f"`{shown}`", reported)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page())

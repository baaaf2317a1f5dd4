"""Print ``docs/attacks.md`` from the tables: ``make attacks > docs/attacks.md``."""

from __future__ import annotations

from attacks.attack import Attack
from attacks.tables import TABLES

HEAD = """# Attacks that are tested

Every row is an input that another person can give to a run, with its result. `make test` runs each
row, and checks the exit code, the message, the time limit, and that nothing outside the row's
folder is written or changed. Root runs the rows whose result may depend on the user (programs,
answers that are code, the system's folders, files of secrets) as an ordinary user too. This page is
generated from the rows of the tests (`make attacks`).
"""

COLUMNS = "| input | exit code | the message contains | ends within |\n|---|---|---|---|"


def document() -> str:
    """The page."""
    parts = [HEAD]
    for table in TABLES.values():
        rows = "\n".join(_row(attack) for attack in table.attacks)
        parts.append(f"## {table.title}\n\n{table.defence}\n\n{COLUMNS}\n{rows}\n")
    return "\n".join(parts)


def _row(attack: Attack) -> str:
    cells = [attack.given, str(attack.code), f"`{attack.says}`", f"{attack.within_s:g} s"]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(document(), end="")

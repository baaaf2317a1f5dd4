"""Migrate every command of the tests and plan its recipe: the table of ``docs/migrating.md``.

    PYTHONPATH=tests:extras/migrate:extras/migrate/tests python -m migration.table

A recipe is planned with the configs of ``recipes/configs``; others are not planned.
"""

from __future__ import annotations

import datetime
import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from migration.commands import COMMANDS
from mppo_migrate.__main__ import migrate
from mppo_migrate.layout import CONFIGS
from verl_flags.flags import read_scripts

from mppo.recipe.errors import ConfigError

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "migrating.md"
BEGIN, END = (
    "<!-- migrated commands: python -m migration.table -->\n",
    "<!-- end of the commands -->\n",
)
HEAD = """| command | keys | no counterpart | not known, refused | to check | dry run on 80 GB |
|---|---|---|---|---|---|
"""
Counted = tuple[str, int, int, int, int]
"""Name, and the numbers of keys and of comments of each kind."""


def commands() -> Iterator[tuple[str, str, list[str], str]]:
    """Name, system, arguments and text of each command."""
    later = {f"2026: {name}": each for name, each in read_scripts("scripts_2026.txt").items()}
    for name, settings in {**read_scripts(), **later}.items():
        words = " ".join(map(shlex.quote, settings))
        yield name, "verl", [], f"python3 -m verl.trainer.main_ppo {words}"
    for name, command in COMMANDS.items():
        yield name, command.system, command.arguments, command.text


def count(name: str, text: str) -> Counted:
    """Count the keys of a recipe's text, and its comments by their heading."""
    headings = ("No counterpart, or none needed:", "Not recognised, or refused:", "To check:")
    found, heading = dict.fromkeys(headings, 0), ""
    keys = 0
    for line in text.splitlines():
        if line[2:] in headings:
            heading = line[2:]
        elif line.startswith("#   ") and heading:
            found[heading] += 1
        elif not line.startswith("#") and not line.partition("#")[0].rstrip().endswith(":"):
            keys += 1
    return name, keys, *found.values()


def rows() -> Iterator[tuple[Counted, str]]:
    """The counts of every command, and the verdict of the dry run."""
    for name, system, arguments, text in commands():
        recipe, _ = migrate(system, text, arguments)
        yield count(name, recipe), _verdict(recipe)


def _verdict(text: str) -> str:
    """Whether the recipe fits, and its layout."""
    from mppo.parallel.launch import discover
    from mppo.trainer.start.checked_recipe import planned_run

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(text)
        (Path(folder) / "configs").symlink_to(ROOT / "recipes" / "configs")
        try:
            found = planned_run(path, (), discover(), None, None)
        except ConfigError as error:
            issue = error.issues[0]
            if any(words in issue.why for words in ("no such folder", "cannot be downloaded")):
                return "not planned: no folder of the model's name in `recipes/configs`"
            return f"`{issue.key}`: {issue.why}".replace("|", "\\|").replace("\n", " ")
    sizes = found.recipe.actor.megatron
    tp, pp = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    return f"{'fits' if found.fits else 'does not fit'}: TP {tp}, PP {pp} of {found.world_size}"


def main() -> None:
    """Write the table into the page, with today's date."""
    os.chdir(ROOT / "recipes")  # where the migration finds ./configs
    assert CONFIGS.is_dir()
    table = "".join(
        f"| `{counts[0]}` | {' | '.join(map(str, counts[1:]))} | {verdict} |\n"
        for counts, verdict in rows()
    )
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    today = f"Migrated and planned on {datetime.date.today()}:\n\n"
    PAGE.write_text(f"{before}{BEGIN}\n{today}{HEAD}{table}\n{END}{after}")


if __name__ == "__main__":
    main()

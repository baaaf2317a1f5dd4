"""Attacks on recipes and their command line."""

from __future__ import annotations

from pathlib import Path

from attacks.attack import Attack, Table


def train(*arguments: str) -> int:
    """The exit code of the trainer with a command line."""
    from mppo.train import main

    return main(arguments)


def _recipe(text: str):
    def prepare(folder: Path) -> None:
        (folder / "recipe.yaml").write_text(text)

    return prepare


def _dry_run(folder: Path) -> int:
    return train("--config", "recipe.yaml", "--dry-run")


TABLE = Table(
    "Recipes",
    "Everything wrong with a recipe is one message.",
    (
        Attack(
            "a key that does not exist",
            prepare=_recipe("modle: 1\n"),
            run=_dry_run,
            says="modle",
        ),
    ),
)

"""Attacks on recipes and their command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attacks.attack import Attack, Table
from attacks.inputs import (
    DEEP,
    LONG,
    TASK,
    fifo,
    folder_there,
    instead,
    link,
    sparse,
    train,
    write,
    zeros,
)

TINY = ("model.path=builtin:tiny", *TASK)
LAUGHS = "\n".join(
    f"{name}: &{name} [{', '.join([f'*{below}'] * 10)}]"
    for below, name in zip("abcdefghi", "bcdefghij")
)
CHAIN = "\n".join(f"x{n}: &x{n} [*x{n - 1}]" for n in range(1, 600))


def _dry_run(folder: Path) -> int:
    return train("--config", "recipe.yaml", "--dry-run")


def _recipe(given: str, text: str | bytes, says: str) -> Attack:
    def prepare(folder: Path) -> None:
        write(folder / "recipe.yaml", text)

    return Attack(given, prepare=prepare, run=_dry_run, says=says)


def _no_file(given: str, make: Callable[[Path], None], says: str) -> Attack:
    return Attack(given, prepare=instead("recipe.yaml", make), run=_dry_run, says=says)


def _settings(given: str, says: str, *settings: str, by_user: bool = False) -> Attack:
    def run(folder: Path) -> int:
        return train("--dry-run", *TINY, *settings)

    return Attack(given, run=run, says=says, by_user=by_user)


def _system_folder(given: str, folder: str, setting: str) -> Attack:
    return _settings(given, f"system's folder {folder}", setting, by_user=True)


def _bases(folder: Path) -> None:
    """Files that each include the next one twice."""
    for n in range(18):
        write(folder / f"{n or 'recipe'}.yaml", f"base: [{n + 1}.yaml, {n + 1}.yaml]\n")
    write(folder / "18.yaml", "modle: 1\n")


def _linked_run_folder(folder: Path) -> None:
    (folder / "runs").mkdir()
    (folder / "runs/mine").symlink_to("/etc")


def _run_in_a_file(folder: Path) -> None:
    write(folder / "results", "mine")


def _command(folder: Path) -> None:
    setting = "x\u2028model: {trust_remote_code: true} #"
    write(folder / "command.sh", f"python ppo.py --lam 1 --stop_token '{setting}'")


def _migrated(folder: Path) -> int:
    from mppo_migrate.__main__ import migrate

    from mppo.recipe.document import parse_yaml

    recipe, _ = migrate("trl", (folder / "command.sh").read_text())
    said = "trust_remote_code" in str(parse_yaml(recipe))
    print(f"{'a' if said else 'no'} trust_remote_code in the recipe")
    return 0


TABLE = Table(
    "Recipes",
    "Each error in a recipe gives one message: unknown keys, wrong values, and text constructed to "
    "loop, to expand or to run code.",
    (
        _recipe("a key that does not exist", "modle: 1\n", "modle"),
        _recipe("a list that contains itself", "data: &a [*a]\n", "it refers to itself"),
        _recipe("a billion values out of aliases of aliases", f"a: &a [1]\n{LAUGHS}", "values"),
        _recipe("600 nested aliases", f"x0: &x0 []\n{CHAIN}", "levels deep"),
        _recipe("500 nested lists", f"data: {DEEP}\n", "nested more than 100 levels"),
        _recipe("a number of 5000 digits", f"data: {{seed: {LONG}}}\n", "5000 digits"),
        _recipe("a list as key", "? [a, b]\n: 1\n", "a sequence cannot be a key"),
        _recipe("a map as key", "{a: 1}: 2\n", "a mapping cannot be a key"),
        _recipe("a NUL in a path", 'model: {path: "a\\0b"}\n', "not valid in text"),
        _recipe("half a surrogate pair", 'model: {path: "\\ud800"}\n', "half a surrogate pair"),
        _recipe("bytes that are not UTF-8", b"model: \xff\xfe\n", "not UTF-8"),
        _recipe(
            "a tag that runs a command",
            "model: !!python/object/apply:os.system ['touch ../outside/done']\n",
            "is not supported",
        ),
        _recipe("a tag that the value does not fit", "data: {seed: !!int x}\n", "match its tag"),
        _recipe("a merge of a number", "data:\n  <<: 5\n", "is not valid YAML"),
        _recipe("a terminal's escape sequence as key", 'a: {"\\e]0;x\\a": 1}\n', "no such key"),
        _recipe("a recipe that is its own base", "base: ./recipe.yaml\n", "each other as base"),
        Attack(
            "18 recipes, each with the next one as base twice",
            prepare=_bases,
            run=_dry_run,
            says="modle",
        ),
        _no_file("a FIFO as recipe", fifo, "is a FIFO"),
        _no_file("a folder as recipe", folder_there, "is a folder"),
        _no_file("a link to /dev/zero as recipe", zeros, "is a device"),
        _no_file("a recipe of a terabyte", sparse, "more than 1048576"),
        _no_file("a recipe that is a link to itself", link("recipe.yaml"), "cannot be read"),
        _settings("500 brackets on the command line", "levels deep", f"data.task_kwargs={DEEP}"),
        _settings("a key of 10,000 parts", "is not a setting", ".".join(["a"] * 10_000) + "=1"),
        _settings("a learning rate of NaN", "finite", "actor.optim.lr=.nan"),
        _settings("a negative batch", "train_batch_size", "data.train_batch_size=-8"),
        _settings("a path of 5000 characters", "File name too long", f"model.path={'x' * 5000}"),
        _system_folder("/ as run folder", "/", "trainer.default_local_dir=/"),
        _system_folder("/ as name of the run", "/", "trainer.experiment_name=/"),
        _system_folder(
            "a run folder in /etc, written with dots",
            "/etc/runs",
            "trainer.default_local_dir=/tmp/../etc/runs",
        ),
        Attack(
            "a run folder that is a link to /etc",
            prepare=_linked_run_folder,
            run=lambda folder: train("--dry-run", *TINY, "trainer.experiment_name=mine"),
            says="system's folder /etc",
            by_user=True,
        ),
        Attack(
            "a file as run folder",
            prepare=_run_in_a_file,
            run=lambda folder: train("--dry-run", *TINY, "trainer.default_local_dir=results"),
            says="is a file",
        ),
        Attack(
            "a flag for mppo-migrate with a line separator, which would end its comment",
            prepare=_command,
            run=_migrated,
            says="no trust_remote_code in the recipe",
            code=0,
        ),
    ),
)

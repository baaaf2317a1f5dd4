"""From the text of a command to the settings of a recipe and the comments on all others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import yaml

from mppo.hub.local_model import is_hub_name
from mppo.recipe.checks import check_recipe
from mppo.recipe.document import inline_yaml, parse_yaml
from mppo.recipe.load import PATH_KEYS, read_recipe
from mppo.recipe.other_systems import system_of
from mppo.recipe.rules.rule import world_size_of
from mppo_migrate.row import Flags, Key, Operand, Setting, System, Without
from mppo_migrate.shell import Command
from mppo_migrate.versions import explained

RANKS_PER_NODE = 8
"""GPUs per node where a command does not say how many it uses."""
_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})")
_NEGATIVE = re.compile(r"-[\d.]")
_TOTAL, _PER_NODE = ("num_processes",), ("nproc_per_node", "num_gpus")
_NODES = ("num_machines", "nnodes", "num_nodes")


@dataclass
class Migration:
    """What becomes of a command.

    Args:
        program: the program of the command, for the recipe's first lines.
        line: the line on which it starts.
    """

    program: str
    line: int
    settings: dict[str, Setting] = field(default_factory=dict)
    """The recipe, by key."""
    without: list[str] = field(default_factory=list)
    """A line per flag without a counterpart."""
    unknown: list[str] = field(default_factory=list)
    """A line per flag that no table has, or whose value is refused."""
    names: list[str] = field(default_factory=list)
    """The command's flags, without their values."""
    foreign: list[str] = field(default_factory=list)
    """Those that no table has: of another version, or mistaken."""
    reward_model: str | None = None
    """The reward model of the command; None: it has none."""
    checks: list[str] = field(default_factory=list)
    """A line per thing that the user should check."""

    def add(self, setting: Setting) -> None:
        """Add a setting; one with the same key is replaced."""
        self.settings.pop(setting.key, None)
        values = setting.value if isinstance(setting.value, list) else [setting.value]
        texts = [_VARIABLE.sub("", v) if setting.key in PATH_KEYS else v
                 for v in values if isinstance(v, str)]  # fmt: skip
        if any("$" in text or "`" in text for text in texts):
            self.unknown.append(
                f"{setting.named}: the script does not give its value; set {setting.key}"
            )
        else:
            self.settings[setting.key] = setting

    def name_variables(self) -> None:
        """Add a check for every path that reads a variable of the environment, except ``HOME``."""
        for setting in self.settings.values():
            names = set(_VARIABLE.findall(str(setting.value))) - {"$HOME", "${HOME}"}
            for name in sorted(names):
                self.checks.append(
                    f"{setting.key}: {name} is not set in the script; the run reads it from the "
                    "environment"
                )

    def add_missing(self, settings: Sequence[Setting]) -> None:
        """Add settings whose key is absent."""
        for setting in settings:
            if setting.key not in self.settings:
                self.add(setting)


def migrate_flags(system: System, commands: Sequence[Command], ranks: int | None) -> Migration:
    """Migrate a command with ``--flags``.

    Args:
        system: the command's system.
        commands: of the script; the one with most known flags is migrated.
        ranks: processes of the command; None: what it says itself.

    Raises:
        ValueError: no command has a flag of the system.
    """
    split = [(command, *_program(system, command)) for command in commands]
    command, launcher, words = max(
        split, key=lambda part: len(part[2].keys() & system.rows.keys()), default=(None, {}, {})
    )
    if command is None or not words.keys() & system.rows.keys():
        raise ValueError(_nothing_known(system, [names for _, _, names in split]))
    if other := _other_trainer(system, command):
        raise ValueError(
            f"line {command.line}: {other!r} is not {system.title}'s PPO; only its PPO is "
            "translated. docs/algorithms.md has mppo's other estimators (algorithm.adv_estimator)"
        )
    first = next((word for word in command.words if _is_program(system, word)), command.words[0])
    result = Migration(first, command.line)
    result.names = list(words)
    result.foreign = [name for name in words if name not in system.rows]
    values = {
        system.dotted.get(name, name): value for name, value in words.items() if name in system.rows
    }
    flags = Flags(values, system.rows, 1, any("." in name for name in words), first)
    nodes, per_node = _ranks(system, flags, launcher, command, ranks, result)
    flags.ranks = nodes * per_node
    _add_origin(result, system, flags, nodes, per_node)
    for name, value in words.items():
        _add_flag(result, system, name, value)
    written = {old: name for name, old in system.dotted.items() if name in words}
    for setting in system.derive(flags):
        result.add(replace(setting, origin=_as_written(setting.origin, written)))
    result.unknown += [
        f"--{written.get(name, name)} {values[name]}: {why}"
        for name, why in _unique(flags.problems)
    ]
    result.add_missing(system.extra)
    result.reward_model = str(values.get(system.reward_model, "the reward model"))
    return result


def _nothing_known(system: System, flags: Sequence[Mapping[str, Any]]) -> str:
    """Why a text without a known flag is refused."""
    given = list(max(flags, key=len, default={}))
    if not given:
        return f"it has no flags; give {system.title}'s command as you would start it"
    cure = "Give the command as you would start it, or write the recipe from the table"
    return f"{explained(system.title, given, given)}. {cure}"


def _as_written(origin: str, written: Mapping[str, str]) -> str:
    """A comment with the command's own spelling of each flag."""
    return re.sub(r"--(\w+)\b", lambda flag: f"--{written.get(flag[1], flag[1])}", origin)


def complete(result: Migration) -> None:
    """Add what every recipe needs, and remove settings that a recipe cannot have.

    Args:
        result: the migration so far; changed.
    """
    scored = "reward.name" in result.settings or "reward_model.path" in result.settings
    if result.reward_model and not scored:
        why = (
            f"serve {result.reward_model} at reward.url (docs/data_and_rewards.md has the request)"
        )
        result.add(Setting("reward.name", "remote", why))
        result.add(Setting("reward.url", "http://127.0.0.1:8000/score"))
    if "reward_model.path" in result.settings:
        result.add_missing([Setting("data.answer_key", None, "a reward model needs no answers")])
    if not result.settings.keys() & {"data.train_files", "data.task", "data.sources"}:
        why = "the command does not name its data: write the prompts to this file"
        result.add(Setting("data.train_files", ["train.jsonl"], why))
    roles = ("model", "critic", "ref", "reward_model")
    models = [result.settings.get(f"{role}.path") for role in roles]
    if any(model is not None and is_hub_name(str(model.value)) for model in models):
        why = "downloads models that are named as on the Hugging Face Hub"
        result.add_missing([Setting("model.hub", True, why)])
    _remove_refused(result)
    result.name_variables()


def _remove_refused(result: Migration) -> None:
    """Make comments of the settings that mppo refuses."""
    while True:
        overrides = [f"{s.key}={inline_yaml(s.value)}" for s in result.settings.values()]
        recipe, issues = read_recipe(None, overrides)
        refused = [
            (key, issue)
            for issue in issues
            for key in result.settings
            if f"{key}.".startswith(f"{issue.key}.") or f"{issue.key}.".startswith(f"{key}.")
        ]
        for key, issue in refused:
            if setting := result.settings.pop(key, None):
                # a recipe's fix for a key of another system is this program
                fix = "" if system_of(issue.key.rpartition(".")[2]) else f"; {issue.fix}"
                result.unknown.append(f"{setting.named}: {issue.why}{fix}")
                if issue.why == "no such key":
                    result.foreign.append(setting.named.partition("=")[0])
        if not refused:
            break
    if recipe is not None:
        issues = [*issues, *check_recipe(recipe, world_size_of(recipe), {})]
    result.checks += [f"mppo refuses {i.key} = {i.value}: {i.why}; {i.fix}" for i in issues]


def _other_trainer(system: System, command: Command) -> str | None:
    """The words that start another trainer of the system; None if there are none."""
    words = command.words
    started = [*words, *(" ".join(pair) for pair in pairwise(words))]
    others = [text for text in started if system.others and re.fullmatch(system.others, text)]
    return others[0] if others else None


def _is_program(system: System, word: str) -> bool:
    return any(re.fullmatch(pattern, word) for pattern in system.programs)


def _program(system: System, command: Command) -> tuple[dict[str, Any], dict[str, Any]]:
    """The flags of a command's launcher, and those of the program."""
    words = command.words
    at = next((i for i, word in enumerate(words) if _is_program(system, word)), 0)
    return _flags(words[:at]), _flags(words[at:])


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """Flags and their values: a list for several, True for none; later ones win."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in (word.strip() for word in words):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if equals else []
        elif word.startswith("-") and not _NEGATIVE.match(word):
            name = ""  # an option of a launcher, such as -m
        elif name:
            found[name].append(word)
    return {name: _value(values) for name, values in found.items()}


def _value(words: Sequence[str]) -> Any:
    values = [_scalar(word) for word in words]
    if len(values) > 1:
        return values
    return values[0] if values else True


def _scalar(word: str) -> Any:
    """A flag's value: a number, true, false or text."""
    try:
        value = parse_yaml(word)
    except yaml.YAMLError:
        return word
    return value if isinstance(value, bool | int | float) else word


def _ranks(
    system: System,
    flags: Flags,
    launcher: Mapping[str, Any],
    command: Command,
    ranks: int | None,
    result: Migration,
) -> tuple[int, int]:
    """Nodes of a command, and ranks of each."""
    nodes = _count(launcher, _NODES) or 1
    per_node = _count(launcher, _PER_NODE)
    total = ranks or _count(launcher, _TOTAL) or (per_node or 0) * nodes
    if not total and system.ranks:
        total = system.ranks(flags)
    if not total and command.words[0].startswith("python"):
        total = 1
    if not total:
        total = RANKS_PER_NODE * nodes
        result.checks.append(
            f"trainer.n_gpus_per_node: the command does not say how many GPUs it uses; {total} are "
            "assumed, and the batch is computed from them. mppo-migrate --ranks N sets the number"
        )
    nodes = nodes if total % nodes == 0 else 1
    if nodes == 1 and total > RANKS_PER_NODE and total % RANKS_PER_NODE == 0:
        nodes = total // RANKS_PER_NODE
    return nodes, total // nodes


def _count(flags: Mapping[str, Any], names: Sequence[str]) -> int | None:
    values = [flags[name] for name in names if type(flags.get(name)) is int and flags[name] > 0]
    return values[0] if values else None


def _add_origin(result: Migration, system: System, flags: Flags, nodes: int, each: int) -> None:
    result.add(Setting("algorithm.preset", system.preset, f"{system.title}'s defaults"))
    result.add(Setting("trainer.nnodes", nodes))
    result.add(Setting("trainer.n_gpus_per_node", each))


def _add_flag(result: Migration, system: System, name: str, value: Any) -> None:
    """What a flag becomes by itself."""
    shown = f"--{name}" if value is True else f"--{name} {_shown(value)}"
    row = system.rows.get(name)
    if row is None:
        result.unknown.append(f"{shown}: {system.title}'s PPO has no such flag in mppo's table")
    elif isinstance(row, Without):
        result.without.append(f"{shown}: {row.why}")
    elif isinstance(row, Key):
        for key in row.names:
            result.add(Setting(key, row.convert(value), f"--{name}", shown))
    else:
        assert isinstance(row, Operand), row


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _unique(problems: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    yield from dict.fromkeys(problems)

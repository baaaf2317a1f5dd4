"""verl's ``main_ppo``: the table of ``verl_keys`` applied to a command."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mppo.recipe.document import apply_overrides, leaves
from mppo.recipe.load import recipe_keys
from mppo.recipe.other_systems import canonical_key
from mppo_migrate.migration import Migration
from mppo_migrate.row import Setting
from mppo_migrate.shell import Command
from mppo_migrate.verl_keys.translation import VerlTranslation, row_of
from mppo_migrate.verl_keys.verl_row import Refused

_SETTING = re.compile(r"[+~]*([A-Za-z_]\w*(?:\.[\w@/]+)*)=(.*)", re.DOTALL)
_PROGRAM = re.compile(
    r"verl\.trainer\.main_ppo|recipe(\.\w+)+\.main_\w+|(.*/)?main_(ppo|dapo)\.py|(.*/)?run_\S*\.sh"
)
_OTHER = re.compile(
    r"verl\.trainer\.(?!main_ppo)[\w.]+|(.*/)?(\w*sft_trainer|main_(eval|generation))\w*\.py"
)
_EXTRA = (
    Setting("rollout.name", "sglang", "verl's default, vLLM, is not supported"),
    Setting("data.answer_key", "reward_model.ground_truth", "the column of verl's parquet files"),
)


def migrate_settings(commands: Sequence[Command]) -> Migration:
    """Migrate verl's command, with its settings ``key=value``.

    Args:
        commands: of the script; the one with most known settings is migrated, and others that start
            a script add theirs.

    Raises:
        ValueError: no command has a setting of verl, or it trains by something else than PPO.
    """
    known = [(command, sum(_is_known(word) for word in command.words)) for command in commands]
    chosen, count = max(known, key=lambda pair: pair[1], default=(None, 0))
    if chosen is None or not count:
        raise ValueError(
            "it has no setting key=value of verl; give the command of main_ppo, or the script that "
            "starts it. docs/migrating.md#verl has the keys that are known"
        )
    if other := next((word for word in chosen.words if _OTHER.fullmatch(word)), None):
        raise ValueError(
            f"line {chosen.line}: {other!r} is not main_ppo; only PPO's command is translated"
        )
    program = next((word for word in chosen.words if _PROGRAM.fullmatch(word)), "main_ppo")
    result = Migration(program, chosen.line)
    result.add(Setting("algorithm.preset", "verl", "verl's defaults"))
    overrides = []
    for command, settings in known:
        if command is chosen or (settings and _starts_script(command)):
            overrides += list(_settings(command, result))
    _translate(overrides, result)
    result.add_missing([*_sizes_of_actor(result)])
    result.add_missing(
        [*_EXTRA, *_stages_of_actor(result), *_expert_layouts(result), *_shares_of_tests(result)]
    )
    return result


def _is_known(word: str) -> bool:
    match = _SETTING.fullmatch(word.strip())
    if match is None or "." not in match[1]:
        return False
    key = canonical_key(match[1])
    sections = {k.split(".")[0] for k in recipe_keys()}
    return key.split(".")[0] in sections or row_of(key.split("."), match[2]) is not None


def _starts_script(command: Command) -> bool:
    return any(_PROGRAM.fullmatch(word) for word in command.words[:3])


def _settings(command: Command, result: Migration) -> Iterator[str]:
    """The settings of a command; its flags become comments."""
    words = [word.strip() for word in command.words]
    at = next((i for i, word in enumerate(words) if _PROGRAM.fullmatch(word)), -1)
    for word in words[at + 1 :]:
        if word.startswith("~"):
            result.without.append(f"{word}: a recipe has no key that must be removed")
        elif word.startswith(("--config-path", "--config-name")):
            result.without.append(f"{word}: algorithm.preset has the defaults of verl's files")
        elif _SETTING.fullmatch(word):
            yield word
        elif word.startswith("-"):
            result.unknown.append(f"{word}: not a setting key=value")


def _translate(overrides: Sequence[str], result: Migration) -> None:
    """Add what the settings become."""
    document, issues = apply_overrides({}, overrides)
    translation = VerlTranslation(document)
    written = {
        canonical_key(name): name for name in (o.lstrip("+").split("=")[0] for o in overrides)
    }
    result.names = list(written.values())
    for issue in (*issues, *translation.issues):
        result.unknown.append(f"{issue.key}={issue.value}: {issue.why}; {issue.fix}")
    for action, keys in translation.removed.items():
        for key, value in keys:
            why = f"{action.why}; {action.fix}" if isinstance(action, Refused) else action.why
            result.without.append(f"{written.get(key, key)}={value}: {why}")
    for key, value in leaves(translation.document):
        origin = translation.origins.get(key) or written.get(key, "")
        same = origin.removeprefix("actor_rollout_ref.") == key
        name = written.get(origin, origin) or key
        result.add(Setting(key, value, "" if same else name, f"{name}={value}"))


def _sizes_of_actor(result: Migration) -> Iterator[Setting]:
    """The actor's sizes for a critic without its own: verl's roles share the layout that the first
    of them sets, which is the actor's."""
    sizes = re.compile(r"(actor|critic)\.(megatron\.(?:tensor|pipeline|context|expert)\w*_size)")
    found = [match for key in result.settings if (match := sizes.fullmatch(key))]
    divided = any(match[2].startswith(("megatron.tensor", "megatron.pipe")) for match in found)
    if divided and all(match[1] == "actor" for match in found):
        for match in found:
            value = result.settings[match[0]].value
            yield Setting(f"critic.{match[2]}", value, "the actor's, as in verl")


def _stages_of_actor(result: Migration) -> Iterator[Setting]:
    """The actor's uneven pipeline stages for the critic and the reference: verl builds them with
    the actor's layout, so its scripts do not repeat them."""
    stages = {role: f"{role}.megatron" for role in ("actor", "critic", "ref")}
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        own = result.settings.get(f"{stages['actor']}.{name}")
        for role in ("critic", "ref"):
            size = result.settings.get(f"{stages[role]}.pipeline_model_parallel_size")
            actors = result.settings.get(f"{stages['actor']}.pipeline_model_parallel_size")
            if own and size and actors and size.value == actors.value:
                yield Setting(f"{stages[role]}.{name}", own.value, "the actor's, as in verl")


def _expert_layouts(result: Migration) -> Iterator[Setting]:
    """The layout of experts that verl's null means: that of the other matrices."""
    for role in ("actor", "critic", "ref"):
        size = result.settings.get(f"{role}.megatron.tensor_model_parallel_size")
        if size is not None and size.value != 1:
            key = f"{role}.megatron.expert_tensor_parallel_size"
            yield Setting(key, None, "the tensor-parallel size, verl's default")


def _shares_of_tests(result: Migration) -> Iterator[Setting]:
    """The score of a program in verl's sandbox is the share of its tests that pass."""
    if "reward.url" in result.settings and "reward.name" not in result.settings:
        yield Setting("reward.kwargs.partial_credit", True, "continuous=True, as in verl")

"""Each of verl's flags is accepted, converted, reported as without effect, or refused."""

from __future__ import annotations

import pytest
from mppo_migrate.trl import ROWS
from mppo_migrate.verl_keys.translation import VERL_ROWS, VerlTranslation, expanded, row_of
from mppo_migrate.verl_keys.verl_row import Ignored, Refused
from verl_flags.document import PAGE, page
from verl_flags.flags import (
    CONVERTED,
    IGNORED,
    OTHER_FLAGS,
    REFUSED,
    SCRIPT_FLAGS,
    Flag,
    read_scripts,
    translate_settings,
)

from mppo.recipe.document import parse_yaml
from mppo.recipe.load import read_recipe, recipe_keys
from mppo.recipe.other_systems import RENAMED

FLAGS = [*SCRIPT_FLAGS, *OTHER_FLAGS]
SCRIPTS = read_scripts()


def at(recipe, key: str):
    """The value under a dotted key, entries of a mapping included."""
    value = recipe.model_dump(mode="json")
    for part in key.split("."):
        value = value[part]
    return value


def recipe_of(translation: VerlTranslation):
    assert not translation.issues
    recipe, faults = read_recipe(translation.document)
    assert not faults
    return recipe


@pytest.mark.parametrize("flag", FLAGS, ids=[flag.setting for flag in FLAGS])
def test_what_becomes_of_a_flag(flag, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    translation = translate_settings([flag.setting])
    recipe = recipe_of(translation)
    if flag.fate in (REFUSED, IGNORED):
        (action,) = translation.removed
        assert isinstance(action, Refused if flag.fate == REFUSED else Ignored)
        assert flag.words in (f"{action.why} {action.fix}" if flag.fate == REFUSED else action.why)
        assert not translation.origins
        return
    taken = (
        flag.words if flag.fate == CONVERTED else f"{flag.words}={flag.setting.split('=', 1)[1]}"
    )
    key, _, value = taken.partition("=")
    expected = parse_yaml(value.replace("$HOME", "/home/someone"))
    assert at(recipe, key) in (expected, [expected])
    assert bool(translation.origins) == (flag.fate == CONVERTED)


def flag_of(setting: str) -> Flag | None:
    """The row of a script's setting: that with its value, or the first with its name."""
    needed = setting.lstrip("+")
    exact = [flag for flag in SCRIPT_FLAGS if flag.setting == needed]
    named = [flag for flag in SCRIPT_FLAGS if flag.name == needed.partition("=")[0]]
    return next(iter(exact or named), None)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_of_a_script_has_a_row_and_nothing_else_is_refused(script):
    flags = [flag_of(setting) for setting in SCRIPTS[script]]
    assert all(flags), SCRIPTS[script][flags.index(None)]
    needed = {flag.words for flag in flags if flag.fate == REFUSED}
    translation = translate_settings(SCRIPTS[script])
    recipe_of(translation)
    refused = [action for action in translation.removed if isinstance(action, Refused)]
    reported = [f"{action.why} {action.fix}" for action in refused]
    assert len(reported) == len(needed), reported
    assert all(any(words in text for text in reported) for words in needed)


def test_there_are_sixteen_scripts():
    assert len(SCRIPTS) == 16


def test_a_key_of_ours_beside_verls_with_another_value_is_a_fault():
    keys = ["actor_rollout_ref.model.enable_gradient_checkpointing=True"]
    keys.append("actor.megatron.recompute_granularity=selective")
    (fault,) = translate_settings(keys).issues
    assert fault.key == "model.enable_gradient_checkpointing"
    assert "also given as 'selective'" in fault.why


def test_sections_that_share_an_alias_are_settled_apart():
    layout = {"param_offload": False, "tensor_model_parallel_size": 2}
    given = {"actor": {"megatron": layout}, "critic": {"megatron": layout}}
    recipe = recipe_of(VerlTranslation(given))
    assert recipe.critic.megatron.tensor_model_parallel_size == 2


def test_the_page_has_the_tables_of_today():
    assert PAGE.read_text() == page(), "run: make verl-flags"


def test_every_renamed_key_leads_to_an_existing_key_or_row():
    keys = recipe_keys()
    for new in RENAMED.values():
        below = any(f"{key}.".startswith(f"{new}.") for key in keys)
        inside = any(f"{new}.".startswith(f"{key}.") for key in keys)
        assert below or inside or row_of([*new.split("."), "name"], None), new


def test_a_recipe_with_a_flag_that_is_not_translated_names_the_command():
    """All flags that a recipe refuses as unknown keys, except those that have a key elsewhere."""
    for flag in FLAGS:
        _, faults = read_recipe(None, [flag.setting])
        unknown = [fault for fault in faults if fault.why == "no such key"]
        assert all("mppo-migrate verl <" in f.fix or "write " in f.fix for f in unknown), flag


def test_a_recipe_knows_the_keys_of_the_tables():
    """A key of verl or TRL that mppo does not have is refused with the command."""
    last_parts = {key.rpartition(".")[2] for key in recipe_keys()}
    unnamed = {"megatron", "optim", "rollout", "partial_rollout", "rollout_ahead"}
    verls = [key for row in VERL_ROWS for key in expanded(row.names)]
    for system, keys in (("verl", verls), ("trl", ROWS)):
        for key in keys:
            _, faults = read_recipe(None, [f"{key.replace('*', 'actor')}=1"])
            for name in (f.key.rpartition(".")[2] for f in faults if f.why == "no such key"):
                assert name in last_parts | unnamed or any(
                    f"mppo-migrate {s} <" in faults[0].fix for s in ("verl", system)
                ), (key, faults)

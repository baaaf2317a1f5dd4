"""Each of verl's flags is accepted, converted, reported as without effect, or refused."""

from __future__ import annotations

import pytest
from verl_flags.document import PAGE, page
from verl_flags.flags import (
    CONVERTED,
    IGNORED,
    OTHER_FLAGS,
    REFUSED,
    SCRIPT_FLAGS,
    Flag,
    read_scripts,
)

from mppo.config.document import parse_yaml
from mppo.config.load import read_recipe
from mppo.train import main

FLAGS = [*SCRIPT_FLAGS, *OTHER_FLAGS]
SCRIPTS = read_scripts()


def at(recipe, key: str):
    """The value under a dotted key, entries of a mapping included."""
    value = recipe.model_dump(mode="json")
    for part in key.split("."):
        value = value[part]
    return value


@pytest.mark.parametrize("flag", FLAGS, ids=[flag.setting for flag in FLAGS])
def test_what_becomes_of_a_flag(flag, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    remarks: list[str] = []
    recipe, faults = read_recipe(None, [flag.setting], remarks)
    if flag.fate == REFUSED:
        assert [flag.words in f"{fault.why} {fault.fix}" for fault in faults] == [True]
        assert not remarks
        return
    assert not faults
    if flag.fate == IGNORED:
        assert [flag.words in remark for remark in remarks] == [True]
        assert remarks[0].startswith("no effect: ")
        return
    taken = (
        flag.words if flag.fate == CONVERTED else f"{flag.words}={flag.setting.split('=', 1)[1]}"
    )
    key, _, value = taken.partition("=")
    expected = parse_yaml(value.replace("$HOME", "/home/someone"))
    assert at(recipe, key) in (expected, [expected])
    assert bool(remarks) == (flag.fate == CONVERTED)


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
    _, faults = read_recipe(None, SCRIPTS[script])
    reported = [f"{fault.why} {fault.fix}" for fault in faults]
    assert len(reported) == len(needed), reported
    assert all(any(words in text for text in reported) for words in needed)


def test_there_are_sixteen_scripts():
    assert len(SCRIPTS) == 16


def test_a_key_of_ours_beside_verls_with_another_value_is_a_fault():
    keys = ["actor_rollout_ref.model.enable_gradient_checkpointing=True"]
    keys.append("actor.megatron.recompute_granularity=selective")
    _, faults = read_recipe(None, keys)
    assert [fault.key for fault in faults] == ["model.enable_gradient_checkpointing"]
    assert "also given as 'selective'" in faults[0].why


def test_sections_that_share_an_alias_are_settled_apart(tmp_path):
    path = tmp_path / "recipe.yaml"
    layout = "actor: {megatron: &layout {param_offload: false, tensor_model_parallel_size: 2}}\n"
    path.write_text(layout + "critic: {megatron: *layout}\n")
    recipe, faults = read_recipe(path)
    assert not faults
    assert recipe.critic.megatron.tensor_model_parallel_size == 2


def test_the_page_has_the_tables_of_today():
    assert PAGE.read_text() == page(), "run: make verl-flags"


def test_the_log_names_what_has_no_effect_and_what_is_taken_otherwise(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    data = "data: {task: arithmetic, max_prompt_length: 64, max_response_length: 64}\n"
    path.write_text(data + "model: {use_remove_padding: true}\n")
    settings = ["critic.megatron.optimizer_offload=True"]
    settings += ["actor_rollout_ref.model.enable_gradient_checkpointing=True"]
    assert main(["--config", str(path), "--dry-run", *settings]) == 0
    reported = capsys.readouterr().err.splitlines()
    assert [line for line in reported if line.startswith("mppo: ")] == [
        "mppo: model.enable_gradient_checkpointing=True is taken as "
        "actor.megatron.recompute_granularity=full",
        "mppo: critic.megatron.optimizer_offload=True is taken as "
        "critic.megatron.offload.optimizer=True",
        "mppo: no effect: model.use_remove_padding=True (sequences are always packed; no padding "
        "is computed)",
    ]

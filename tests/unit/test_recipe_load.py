"""Reading recipes: YAML, overrides, includes, verl's names, the JSON schema."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from mppo.recipe.document import merge_documents, parse_yaml
from mppo.recipe.errors import ConfigError, ConfigIssue, nearest
from mppo.recipe.load import json_schema, load_recipe, read_recipe, resolved_yaml
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.rollout import SamplingConfig

ROOT = Path(__file__).parents[2]


def write(tmp_path: Path, text: str, name: str = "recipe.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_an_empty_recipe_is_the_defaults(tmp_path):
    assert load_recipe(write(tmp_path, "")) == Recipe() == load_recipe(None)


def test_overrides_replace_values_of_the_file_and_earlier_overrides(tmp_path):
    path = write(tmp_path, "actor: {optim: {lr: 1e-5}, ppo_epochs: 2}")
    recipe = load_recipe(path, ["actor.optim.lr=2e-5", "actor.optim.lr=3e-5"])
    assert recipe.actor.optim.lr == 3e-5
    assert recipe.actor.ppo_epochs == 2


def test_override_values_are_yaml(tmp_path):
    recipe = load_recipe(
        None,
        [
            "data.train_files=[a.jsonl, b.jsonl]",
            "critic.path=null",
            "data.task_kwargs={max_operand: 9, scale: 1e6}",
            "rollout.n=4",
            "+trainer.seed=7",
            "data.system_prompt=think = then answer",
        ],
    )
    assert recipe.data.train_files == ("a.jsonl", "b.jsonl")
    assert recipe.critic.path is None
    assert recipe.data.task_kwargs == {"max_operand": 9, "scale": 1e6}
    assert (recipe.rollout.n, recipe.trainer.seed) == (4, 7)
    assert recipe.data.system_prompt == "think = then answer"


@pytest.mark.parametrize(
    "override",
    [
        "rollout.server_args={}",
        "~rollout.server_args",
        "actor_rollout_ref.rollout.engine_kwargs.sglang={}",
        "~actor_rollout_ref.rollout.engine_kwargs.sglang",
    ],
)
def test_an_override_empties_a_mapping_of_the_recipe(override, tmp_path):
    base = "rollout: {n: 3, server_args: {mem_fraction_static: 0.4}}"
    path = write(tmp_path, base)
    recipe = load_recipe(path, [override])
    assert (recipe.rollout.server_args, recipe.rollout.n) == ({}, 3)
    later = load_recipe(path, [override, "rollout.server_args.max_total_tokens=8"])
    assert later.rollout.server_args == {"max_total_tokens": 8}


def test_a_key_that_nothing_sets_cannot_be_removed(tmp_path):
    path = write(tmp_path, "rollout: {n: 3}")
    for key in ("rollout.server_arg", "rollout.n.x", "", "rollout.n=3"):
        _, issues = read_recipe(path, [f"~{key}"])
        assert [(issue.key, issue.value) for issue in issues] == [("command line", f"~{key}")]


def test_verl_long_names_are_accepted(tmp_path):
    recipe = load_recipe(
        None,
        [
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "actor_rollout_ref.rollout.n=5",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3",
            "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2",
            "actor_rollout_ref.model.path=builtin:tiny-llama",
            "critic.model.path=builtin:tiny",
            "critic.forward_micro_batch_size_per_gpu=6",
        ],
    )
    assert recipe.actor.optim.lr == 1e-6
    assert recipe.rollout.n == 5
    assert recipe.actor.log_prob_micro_batch_size_per_gpu == 3
    assert recipe.ref.megatron.tensor_model_parallel_size == 2
    assert (recipe.model.path, recipe.critic.path) == ("builtin:tiny-llama", "builtin:tiny")
    assert recipe.critic.log_prob_micro_batch_size_per_gpu == 6


def test_yaml_words_are_strings_and_numbers_are_numbers():
    parsed = parse_yaml("{a: off, b: no, c: 1e-6, d: 2024-01-01, e: 12:30, f: true, g: 010, h: ~}")
    assert parsed == {
        "a": "off", "b": "no", "c": 1e-6, "d": "2024-01-01", "e": "12:30", "f": True, "g": 10.0,
        "h": None,
    }  # fmt: skip


def test_base_recipes_are_merged(tmp_path):
    write(tmp_path, "actor: {ppo_epochs: 3}\ntrainer: {seed: 1}", "low.yaml")
    write(tmp_path, "base: low.yaml\ntrainer: {seed: 2}", "middle.yaml")
    path = write(tmp_path, "base: [middle.yaml]\ndata: {seed: 9}", "top.yaml")
    recipe = load_recipe(path)
    assert (recipe.actor.ppo_epochs, recipe.trainer.seed, recipe.data.seed) == (3, 2, 9)


def test_merge_does_not_change_its_arguments():
    under, over = {"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}
    assert merge_documents(under, over) == {"a": {"b": 3, "c": 2}}
    assert (under, over) == ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})


def test_validation_and_greedy_responses_use_the_training_stop_tokens(tmp_path):
    chosen = ["rollout.stop_token_ids=[5, 6]", "rollout.temperature=0.7"]
    rollout = load_recipe(None, [*chosen, "rollout.val_kwargs.top_p=0.9"]).rollout
    assert rollout.greedy == SamplingConfig(temperature=0.0, stop_token_ids=(5, 6))
    expected = SamplingConfig(temperature=0.0, top_p=0.9, stop_token_ids=(5, 6))
    assert rollout.validation == expected
    for own, ids in (("[]", ()), ("[7]", (7,))):
        recipe = load_recipe(None, [*chosen, f"rollout.val_kwargs.stop_token_ids={own}"])
        assert recipe.rollout.validation.stop_token_ids == ids
        assert load_recipe(write(tmp_path, resolved_yaml(recipe))) == recipe


def test_a_preset_gives_defaults_and_the_recipe_keeps_its_own_values(tmp_path):
    recipe = load_recipe(None, ["algorithm.preset=trl", "algorithm.lam=0.9"])
    assert (recipe.algorithm.lam, recipe.critic.value_loss_coef) == (0.9, 0.1)
    assert load_recipe(write(tmp_path, resolved_yaml(recipe))) == recipe


def test_paths_are_expanded(monkeypatch):
    monkeypatch.setenv("DATA_HERE", "/somewhere")
    monkeypatch.setenv("HOME", "/home/someone")
    recipe = load_recipe(None, ["data.train_files=[$DATA_HERE/a.jsonl]", "model.path=~/m"])
    assert recipe.data.train_files == ("/somewhere/a.jsonl",)
    assert recipe.model.path == "/home/someone/m"


def test_the_resolved_recipe_loads_back_to_itself(tmp_path):
    recipe = load_recipe(None, ["ref.megatron.tensor_model_parallel_size=2", "actor.optim.lr=3e-7"])
    assert load_recipe(write(tmp_path, resolved_yaml(recipe))) == recipe


def test_a_section_set_in_part_keeps_its_other_defaults():
    recipe = load_recipe(None, ["critic.optim.eps=1e-6", "rollout.val_kwargs.n=1"])
    assert recipe.critic.optim.lr == Recipe().critic.optim.lr == 1e-5
    assert recipe.rollout.val_kwargs == Recipe().rollout.val_kwargs


def test_all_issues_are_reported_at_once(tmp_path):
    path = write(tmp_path, "actor: {ppo_epoch: 2, optim: {lr: fast}}\nrollout: {name: vlm}")
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, ["data.train_batch_size=0"])
    keys = {issue.key for issue in caught.value.issues}
    assert keys == {
        "actor.ppo_epoch", "actor.optim.lr", "rollout.name", "data.train_batch_size",
    }  # fmt: skip
    text = str(caught.value)
    assert "4 issues" in text
    assert "did you mean actor.ppo_epochs?" in text


def test_bad_values_fall_back_to_defaults_so_that_other_keys_are_checked(tmp_path):
    path = write(tmp_path, "actor: {ppo_epochs: none}\ntrainer: {seed: 3}")
    recipe, issues = read_recipe(path)
    assert [issue.key for issue in issues] == ["actor.ppo_epochs"]
    assert (recipe.trainer.seed, recipe.actor.ppo_epochs) == (3, 1)


def test_long_values_are_cut_in_messages():
    assert len(str(ConfigIssue("a.b", "x" * 1000, "w", "c"))) < 200


def test_nearest_returns_a_close_name_or_none():
    assert nearest("train_bach_size", ["train_batch_size", "val_size"]) == "train_batch_size"
    assert nearest("zebra", ["train_batch_size", "val_size"]) is None


def test_the_json_schema_file_equals_the_code():
    written = json.loads((ROOT / "docs" / "recipe.schema.json").read_text())
    assert written == json_schema(), "run: make schema"


def test_every_key_is_described_in_the_json_schema():
    schema = json_schema()
    sections = [("", schema), *schema["$defs"].items()]
    undescribed = [
        f"{name}.{key}"
        for name, section in sections
        for key, field in section["properties"].items()
        if not field.get("description")
    ]
    assert undescribed == []


def test_shipped_recipes_agree_with_the_json_schema():
    validator = jsonschema.Draft202012Validator(json_schema())
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        errors = list(validator.iter_errors(parse_yaml(path.read_text())))
        assert not errors, f"{path}: {errors[0].message}"


def test_the_resolved_recipe_is_plain_yaml():
    assert yaml.safe_load(resolved_yaml(Recipe()))["rollout"]["verify_sync"] == "off"


@pytest.mark.parametrize(
    ("overrides", "measured"),
    [
        ([], True),
        (["bypass_mode=true"], False),
        (["bypass_mode=true", "rollout_rs=token_k1"], True),
        (["bypass_mode=true", "rollout_token_veto_threshold=1e-4"], True),
    ],
)
def test_the_actor_computes_old_logprobs_unless_the_engines_are_used(overrides, measured):
    named = [f"algorithm.rollout_correction.{override}" for override in overrides]
    assert load_recipe(None, named).needs_actor_logprobs is measured


def test_a_full_kl_needs_the_actors_forward_pass():
    keys = ["rollout_correction.bypass_mode=true", "use_kl_in_reward=true", "kl_penalty=full"]
    assert load_recipe(None, [f"algorithm.{key}" for key in keys]).needs_actor_logprobs

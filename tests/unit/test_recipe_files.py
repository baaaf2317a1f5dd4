"""Every shipped recipe loads, violates no rule, and can be planned without a GPU or weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from mppo.hub.builtin import resolve_model
from mppo.planning.describe import describe_plan
from mppo.planning.run_plan import plan_roles
from mppo.recipe.document import parse_yaml
from mppo.recipe.load import load_recipe
from mppo.recipe.rules.rule import world_size_of
from mppo.train import main
from mppo.trainer.start.loading import load_checked

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
CONFIGS = ROOT / "recipes" / "configs"
HEADINGS = ("resolved recipe", "layout of", "one iteration", "parameters", "memory by phase",
            "who is where in which phase", "verdict")  # fmt: skip
PARAMETERS = {
    "Qwen2-7B-Instruct": 7_615_616_512,
    "Qwen2.5-32B-Instruct": 32_763_876_352,
    "deepseek-llm-7b-chat": 6_910_365_696,
    "gemma-2-2b-it": 2_614_341_888,
    "Qwen1.5-MoE-A2.7B-Chat": 14_315_784_192,
    "SmolLM2-135M-Instruct": 134_515_008,
    "EleutherAI_pythia-1b-deduped__sft__tldr": 1_011_781_632,
    "pythia-160m": 162_322_944,
    "SmolLM2-1.7B-sft": 1_711_376_384,
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Llama-3-8b-sft-mixture": 8_030_261_248,
}
"""Parameter counts of the model cards' safetensors metadata."""


@pytest.fixture(scope="session")
def read_config(tmp_path_factory):
    cache = tmp_path_factory.mktemp("builtin")

    def read(path: str):
        if path.startswith("builtin:"):
            return AutoConfig.from_pretrained(resolve_model(path, cache))
        return AutoConfig.from_pretrained(CONFIGS / Path(path).name)

    return read


def configs(recipe, read_config):
    """Config objects by role."""
    return {role.name: read_config(role.path) for role in recipe.roles()}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_dry_run_of_a_shipped_recipe_needs_no_model_and_ends_with_a_verdict(
    path, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["--config", str(path), "--dry-run", "--show-recipe"]) == 0
    plan = capsys.readouterr().out
    assert plan.startswith("verdict: fits, with ")
    for heading in HEADINGS:
        assert f"\n# {heading}" in f"\n{plan}"
    assert re.search(r"^fits, with [\d.]+ GiB to spare$", plan, re.MULTILINE)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipe_says_what_it_is_for(path):
    assert path.read_text().startswith("# ")
    assert load_recipe(path).trainer.experiment_name != "run"


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameter_count_is_the_published_one(name, read_config):
    config = read_config(name)
    layers = config.num_hidden_layers
    overrides = ["data.task=arithmetic", f"model.path={name}", "data.max_response_length=64"]
    recipe = load_checked(None, overrides, 1, read_config, files=False)
    plan = plan_roles(recipe, 1, configs(recipe, read_config))[0]
    assert (plan.parameters, layers) == (PARAMETERS[name], layers)
    assert plan.stage_parameters == [plan.parameters]


def test_a_cluster_recipe_shows_its_layouts(read_config):
    path = ROOT / "recipes" / "qwen2.5_32b_gsm8k_math.yaml"
    recipe = load_checked(path, [], None, read_config, files=False)
    assert world_size_of(recipe) == 32
    text = describe_plan(recipe, 32, configs(recipe, read_config))
    assert len(re.findall(r"^(?:actor|critic) +TP4 x PP4 x DP2 ", text, re.MULTILINE)) == 2
    assert "31    tp3 cp0 dp1 pp3  tp3 cp0 dp1 pp3" in text


def test_recipes_keep_every_key_spelt_once():
    for path in [*RECIPES, *(ROOT / "recipes" / "common").glob("*.yaml")]:
        assert isinstance(parse_yaml(path.read_text()), dict)


def test_a_dry_run_counts_every_role_by_its_own_model(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text("data: {task: arithmetic, max_prompt_length: 64, max_response_length: 64}\n")
    moonlight = "builtin:tiny-moonlight"
    own = ("model.path=builtin:tiny", f"critic.path={moonlight}", "algorithm.use_kl_in_reward=true")
    assert main(["--config", str(path), "--dry-run", *own]) == 0
    text = capsys.readouterr().out.split("# parameters and estimated memory")[1]
    counted = dict(re.findall(r"^(actor|critic|ref) +([\d,]+)", text, re.MULTILINE))
    assert counted["actor"] == counted["ref"] != counted["critic"]
    assert main(["--config", str(path), "--dry-run", f"model.path={moonlight}"]) == 0
    alike = capsys.readouterr().out.split("# parameters and estimated memory")[1]
    assert re.search(r"^critic .*$", alike, re.MULTILINE)[0] in text

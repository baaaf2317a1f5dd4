"""The scaled-down twin of every recipe for GPUs runs two steps on two CPU processes."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from recipe_list import GPU_RECIPES
from recipe_run import run_recipe
from recipe_twins import scaled_down, write_home, write_twin

from mppo.parallel.launch import discover
from mppo.recipe.document import leaves, read_document
from mppo.recipe.load import load_recipe
from mppo.train import main
from mppo.trainer.start.checked_recipe import checked_recipe
from mppo.trainer.start.scaled_down import scale_down


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    write_home(folder)
    return folder


CHANGED = re.compile(
    r"model\.(path|hub)|data\.(train_files|val_files|train_batch_size|max_response_length|val_size)"
    r"|(actor|critic|reward_model)\.(.*micro_batch_size_per_gpu|megatron\.\w+_(size|stage))"
    r"|(actor|critic)\.(ppo_mini_batch_size|router_replay|optim\.lr_warmup_steps)"
    r"|rollout\.(name|mode|urls|max_staleness|tensor_model_parallel_size|server_args\.\w+)"
    r"|total_episodes|trainer\.(nnodes|n_gpus_per_node|total_training_steps|save_freq|logger)"
)
"""The keys in which a twin may differ from its recipe."""


@pytest.mark.parametrize("recipe", GPU_RECIPES, ids=lambda path: path.stem)
def test_a_twin_differs_in_sizes_and_servers_only(recipe):
    document, _ = read_document(recipe)
    before, after = dict(leaves(document)), dict(leaves(scaled_down(document)))
    keys = before.keys() | after.keys()
    changed = {key for key in keys if before.get(key) != after.get(key)}
    assert not {key for key in changed if not CHANGED.fullmatch(key)}


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", GPU_RECIPES, ids=lambda path: path.stem)
def test_the_twin_of_a_recipe_runs_two_steps(recipe, home, tmp_path):
    path = write_twin(recipe, tmp_path)
    rows, loaded = run_recipe(str(path), tmp_path / "run", HOME=str(home)), load_recipe(path)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        for name in ("actor/grad_norm", "critic/grad_norm", "critic/score/mean"):
            assert math.isfinite(row[name]), name
        assert row["actor/grad_norm"] + row["critic/grad_norm"] > 0
        if loaded.needs_actor_logprobs:
            assert row["training/rollout_logprob_diff_max"] < 0.2
        by_model = [key for key in row if key.endswith("/rm_score/mean")]
        assert bool(by_model) == loaded.reward_model.in_use


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_recipe_scales_down_to_the_processes(world, tmp_path, monkeypatch):
    monkeypatch.setenv("MPPO_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("recipes").symlink_to(
        GPU_RECIPES[0].parent
    )  # an agent's file is found from the working directory
    for recipe in GPU_RECIPES:
        twin, lines = scale_down(recipe, world)
        loaded = checked_recipe(twin, (), discover({}), world)
        assert loaded.trainer.total_training_steps == 2
        assert loaded.data.task == "arithmetic"
        assert loaded.rollout.name == "local"
        sizes = [role.megatron.tensor_model_parallel_size for role in loaded.roles()]
        assert world % 2 == 0 or set(sizes) == {1}
        assert any(line.startswith("scaled down: model.path: ") for line in lines)


@pytest.mark.distributed
def test_a_scaled_down_recipe_runs_with_nothing_prepared(tmp_path):
    name = "qwen3_30b_a3b_gsm8k_math.yaml"
    home = {"HOME": str(tmp_path), "MPPO_CACHE": str(tmp_path / "cache")}
    rows = run_recipe(name, tmp_path / "run", "--scale-down", **home)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(math.isfinite(row["actor/grad_norm"]) for row in rows)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--scale-down", "actor.optim.lr=1e-6"], "needs a recipe"),
        (["--scale-down", "--dry-run", "--config", "recipe.yaml"], "leave out --dry-run"),
    ],
)
def test_scaling_down_needs_a_recipe_and_a_run(arguments, why, capsys):
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert why in capsys.readouterr().err


def test_a_model_without_a_known_config_is_named(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {path: /nowhere/Model-7B}\ndata: {task: arithmetic}\n")
    assert main(["--config", str(recipe), "--scale-down"]) == 2
    assert "/nowhere/Model-7B" in capsys.readouterr().err

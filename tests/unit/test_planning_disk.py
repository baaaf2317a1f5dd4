"""The disk space of checkpoints is reported before they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from mppo.hub.builtin import read_model_config, resolve_model
from mppo.planning.checkpoint_space import (
    checkpoint_bytes,
    describe_checkpoints,
    disk_warning,
    host_copy_bytes,
    host_copy_warning,
)
from mppo.planning.run_plan import plan_roles
from mppo.recipe.load import load_recipe
from mppo.train import main

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "recipes" / "configs" / "Qwen2-7B-Instruct")
TRUNK, HEAD = 7_615_616_512, 152_064 * 3584
"""Qwen2-7B's parameters, and those of its language-model head."""


def planned(*settings: str):
    recipe = load_recipe(None, ["data.task=arithmetic", *settings])
    config = read_model_config(resolve_model(recipe.model.path))
    return recipe, plan_roles(recipe, 1, {"actor": config, "critic": config, "ref": config})


@pytest.mark.parametrize(
    ("settings", "actor", "critic"),
    [
        ([], 2 + 4 + 8, 2 + 4 + 8),
        (["model.dtype=float32"], 4 + 8, 4 + 8),
        (["actor.ema_decay=0.9"], 2 + 4 + 8 + 4, 2 + 4 + 8),
        (["trainer.checkpoint_hf=true"], 2 + 4 + 8 + 2, 2 + 4 + 8),
        (["algorithm.use_kl_in_reward=true"], 2 + 4 + 8, 2 + 4 + 8),
        (["algorithm.adv_estimator=reinforce_plus_plus"], 2 + 4 + 8, 0),
    ],
)
def test_bytes_of_a_checkpoint(settings, actor, critic):
    found = checkpoint_bytes(*planned(f"model.path={CONFIG}", *settings))
    assert found == TRUNK * actor + (TRUNK - HEAD + 3584) * critic


@pytest.mark.parametrize(
    ("settings", "steps", "free", "text"),
    [
        (["save_freq=5"], 10, 412e9, None),  # two of 205.6 GB
        (["save_freq=5"], 10, 411e9, "2 checkpoints take 411.2 GB, and its disk has 411.0 GB free"),
        (["save_freq=5", "max_ckpt_to_keep=1"], 90, 411e9, "2 checkpoints take 411.2 GB"),
        (["save_every_minutes=9"], 10, 206e9, None),
        (["save_every_minutes=9"], 10, 1e9, "a checkpoint takes 205.6 GB"),
        ([], 10, 1e9, "a checkpoint takes 205.6 GB, and its disk has 1.0 GB free"),
    ],
)
def test_a_disk_without_room_for_checkpoints_is_told_at_the_start(settings, steps, free, text):
    keys = [f"trainer.{each}" for each in settings]
    recipe, plans = planned(f"model.path={CONFIG}", *keys)
    found = disk_warning(recipe, plans, steps, int(free))
    assert found is None if text is None else text in found


@pytest.mark.parametrize(
    ("settings", "steps", "text"),
    [
        ([], 10, "only when the run is stopped, 205.6 GB each"),
        (["save_freq=20"], 1401, "every 20 steps, 205.6 GB each; all 71 are kept: 14.6 TB"),
        (
            ["save_freq=20"],
            None,
            "all are kept: 20.6 TB per 100 (trainer.max_ckpt_to_keep limits them)",
        ),
        (["save_freq=5", "max_ckpt_to_keep=3"], 9, "the newest 3 are kept: up to 822.4 GB"),
        (["save_every_minutes=30"], 9, "every 30 minutes, 205.6 GB each; all are kept: "),
    ],
)
def test_the_disk_space_of_kept_checkpoints_is_reported(settings, steps, text):
    keys = [f"trainer.{key}" for key in settings]
    assert text in describe_checkpoints(*planned(f"model.path={CONFIG}", *keys), steps)


def test_the_copy_of_a_background_save_is_divided_over_the_nodes():
    path = ROOT / "recipes" / "qwen2_7b_rm.yaml"
    recipe = load_recipe(path, ["trainer.nnodes=2", "reward_model.enable=false"])
    config = read_model_config(Path(CONFIG))
    plans = plan_roles(recipe, 16, {"actor": config, "critic": config})
    copy = host_copy_bytes(recipe, plans)
    assert copy == checkpoint_bytes(recipe, plans) / 2
    assert describe_checkpoints(recipe, plans, 9).endswith("memory holds a copy of 102.8 GB")
    waiting = load_recipe(path, ["trainer.nnodes=2", "trainer.async_save=false"])
    assert host_copy_bytes(waiting, plans) == 0
    assert host_copy_warning(copy, copy, "physical memory") is None
    warning = host_copy_warning(copy, 64 * 10**9, "limit of the cgroup")
    assert warning is not None
    assert "102.8 GB on each node, which has 64.0 GB (limit of the cgroup)" in warning
    assert "set trainer.async_save=false" in warning


def test_a_dry_run_prints_the_disk_space(capsys):
    keys = ["data.max_prompt_length=64", "data.max_response_length=64"]
    save = ["trainer.save_freq=3", "trainer.total_training_steps=9"]
    assert main(["--dry-run", "data.task=arithmetic", *keys, *save]) == 0
    assert (
        "# checkpoints\nevery 3 steps, 18.0 MB each; all 3 are kept: 53.9 MB"
        in capsys.readouterr().out
    )

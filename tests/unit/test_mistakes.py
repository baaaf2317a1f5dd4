"""Users' mistakes with programs: exit code, the words that name the fix, nothing heavy imported.

``bad_recipes`` has the mistakes inside recipes, ``test_config_bad_input`` runs them.
"""

from __future__ import annotations

import shlex

import pytest
from bad_recipe import GOOD
from bad_recipes import layouts, rewards, runs, settings
from light_programs import LightPrograms

TRAIN = "mppo-train --config recipe.yaml"
# the command and what it says; each ends with 2
MISTAKES = {
    "mppo-train": "give a recipe: --config recipe.yaml",
    "mppo-train recipe.yaml": "write section.key=value, such as actor.optim.lr=1e-6",
    "mppo-train --confg recipe.yaml": "unrecognized arguments: --confg",
    "mppo-train --config": "argument --config: expected one argument",
    "mppo-train --config nowhere.yaml": "fix: give a YAML file",
    "mppo-train --config folder": "is a folder, not a file",
    "mppo-train data.task=arithmetic actor.ppo_mini_batch=3": "actor.ppo_mini_batch_size?",
    f"{TRAIN} --trainer.seed=3": "a key of the recipe has no dashes: write trainer.seed=3",
    f"{TRAIN} trainer.seed 3": "write section.key=value",
    f"{TRAIN} --world-size 3": "without it the launcher sets the number of ranks",
    f"{TRAIN} --world-size many --dry-run": "invalid int value: 'many'",
    f"{TRAIN} --gpu h100-80gb": "--gpu needs --dry-run",
    f"{TRAIN} --simulate": "--simulate needs --dry-run",
    f"{TRAIN} --time": "--time needs --dry-run",
    f"{TRAIN} --search best.yaml": "--search needs --dry-run",
    f"{TRAIN} --picture plan.svg": "--picture needs --dry-run",
    f"{TRAIN} --mean-prompt 100": "--mean-prompt needs --dry-run",
    f"{TRAIN} --mean-response 100": "--mean-response needs --dry-run",
    f"{TRAIN} actor.ppo_mini_batch=3": "did you mean actor.ppo_mini_batch_size?",
    f"{TRAIN} rollout.temperature=0": "rollout.temperature",
    f"{TRAIN} data.train_files=[nowhere.jsonl] data.task=null": "give the path of a readable file",
    f"{TRAIN} model.path=Qwen/Qwen2.5-0.5B-Instruct": "set model.hub: true, or run `hf download",
    f"{TRAIN} model.path=folder": "give a Hugging Face model folder",
    f"{TRAIN} actor_rollout_ref.rollout.name=vllm": "set rollout.name: sglang",
    f"{TRAIN} trainer.logger=[tensorbord]": "did you mean tensorboard?",
    f"{TRAIN} --dry-run reward.name=function reward.function=no.py:score": "no such file no.py",
    f"{TRAIN} --dry-run --world-size 3 actor.megatron.tensor_model_parallel_size=2":
        "start a multiple of 2 ranks",
    "mppo-plan": "set data.task (arithmetic, ...) or data.train_files",
    "mppo-plan recipe.yaml": "write section.key=value",
    "mppo-plan --config nowhere.yaml": "fix: give a YAML file",
    "mppo-plan --config recipe.yaml --search": "argument --search: expected one argument",
    "mppo-inspect": "the following arguments are required: folder",
    "mppo-inspect nowhere": "give the folder of a run with trainer.dump_rollouts: true",
    "mppo-inspect folder": "give the folder of a run with trainer.dump_rollouts: true",
    "mppo-inspect folder --stp 3": "unrecognized arguments: --stp 3",
    "mppo-inspect folder --step last": "invalid int value: 'last'",
    "mppo-migrate": "the following arguments are required",
    "mppo-migrate verll": "invalid choice: 'verll'",
    "python -m mppo.data": "the following arguments are required: command",
    "python -m mppo.data prepare": "the following arguments are required: name, --from, --out",
    "python -m mppo.data prepare gsm9k --from folder --out new": "invalid choice: 'gsm9k'",
    "python -m mppo.data prepare gsm8k --from folder --out full --format jsonl":
        "name a new folder",
}  # fmt: skip


@pytest.fixture(scope="module")
def programs():
    with LightPrograms() as found:
        yield found


@pytest.mark.parametrize(("command", "says"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_told_before_anything_heavy_is_imported(command, says, programs, tmp_path):
    folder, out = tmp_path / "folder", tmp_path / "out"
    for path in (folder, out, tmp_path / "full" / "x"):
        path.mkdir(parents=True)
    (tmp_path / "recipe.yaml").write_text(GOOD)
    words = shlex.split(command)
    at = 3 if words[0] == "python" else 1
    told = programs.run(" ".join(words[:at]), words[at:], tmp_path, out)
    assert told.code == 2, told.err
    assert says in " ".join(told.err.split()), told.err
    assert "Traceback" not in told.err
    assert told.out == ""


def test_the_tables_hold_sixty_mistakes():
    recipes = (
        settings.SETTINGS, settings.DOCUMENTS, layouts.LAYOUTS, runs.AGENTS, runs.CODE,
        runs.OFFLOAD, runs.VALIDATION, runs.DUMPS, rewards.REWARD_MODELS, rewards.REWARD_SERVERS,
    )  # fmt: skip
    assert len(MISTAKES) + sum(map(len, recipes)) >= 60

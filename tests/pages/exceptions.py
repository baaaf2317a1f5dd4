"""Blocks of the documentation that cannot run in a test, or that need something to run.

Every entry must match a block: ``test_pages`` fails for one that does not.
"""

from __future__ import annotations

import sys

from pages.blocks import ROOT
from pages.world import RECIPE

NOT_RUN: dict[str, str] = {
    r"warm start 80/80": "the end of a run of four minutes; benchmarks/results has its numbers",
    r"<run>/checkpoints/global_step_40/": "a tree of files; test_checkpoint_folder.py",
    r"mppo: no heartbeat for 20 s": "messages of failing ranks; test_faults.py and "
    "test_supervision_heartbeat.py provoke them",
    r"mppo: rank 1 of 2 failed while reward": "a message of a failing rank; test_error_reports.py",
    r"^mppo: rank 1 of 2 \(pid": "a message about a stopped rank; test_faults.py",
    r"mppo: no rank has made progress": "a message of hanging ranks; test_faults.py",
    r"out of memory in: update": "a message of a failing rank; test_trainer_failures.py",
    r"failed while export: the disk is full": "a message of a failing rank; test_error_reports.py",
    r"^generation      the rollout engine": "a picture: the stages of an iteration",
    r"^# of mppo/trainer/loop\.py": "a part of the loop; test_readme.py compares it",
    r"^loss = \(l_1 \+ l_2 ": "a formula: the loss of the tokens above",
    r"^sequential\nstage 0": "a picture: timelines; test_schedule.py",
    r"^mppo: job 3 start 1": "the log of a job of minutes; test_slurm.py",
    r"^python examples/scripts/ppo/ppo\.py": "TRL's command, the input of mppo-migrate; "
    "test_migrate.py",
    r"^# TRL's examples/scripts/ppo/ppo.py, written": "names a model of the Hub; test_migrate.py "
    "compares it with what mppo-migrate prints, and loads such recipes",
    r"python -m sglang\.launch_server": "SGLang's own program; test_sglang_classifier.py starts it",
    r"^\$ mppo-simulate recipes/(moonlight|deepseek_v3)": "test_simulation_recipes.py does",
    r"^\$ mppo-simulate .* --all\n": "takes minutes; test_benchmarks.py simulates ranks together",
    r"^srun --container-image": "an option of pyxis; test_slurm_scripts.py shows these lines",
    r"^export MPPO_ROLLOUT_API_KEY": "a server of SGLang; test_serve_actor.py runs these lines",
    r"^# my_program\.py": "runs an episode; test_agents_programs.py runs it",
    r"^mppo-evaluate .*--samples sft": "needs two models and a judge; test_evaluate.py and "
    "test_validation_judge.py have one",
    r"AutoModelForSequenceClassification as M": "reads the weights of a published model",
}
"""A pattern of a block's text, and the reason that it does not run (or where it runs)."""

TOLERANCES: dict[str, float | None] = {
    r"--hf smollm2": None,  # here another model has this name
    r"^\$ mppo-simulate": 0.02,  # operations and peaks change a little with the code
}
"""By pattern of a block, how far numbers of its output may differ; None: words are compared only.
Other outputs must be equal."""

SMALL: dict[str, str] = {
    "docs/adding_an_estimator.md": "trainer.total_training_steps=1 trainer.warm_start_steps=0 "
    "data.train_batch_size=4 data.val_size=4 actor.ppo_mini_batch_size=4",
    "docs/start.md": "trainer.total_training_steps=1 trainer.warm_start_steps=0 "
    "data.train_batch_size=4 data.val_size=4 actor.ppo_mini_batch_size=4",
    "docs/schedule.md": "trainer.total_training_steps=3 data.train_batch_size=32 "
    "actor.ppo_mini_batch_size=8 actor.ppo_micro_batch_size_per_gpu=4 "
    "critic.ppo_micro_batch_size_per_gpu=4 data.max_response_length=4 data.val_size=4",
}
"""Pages whose runs for the CPU are real, with settings that make them small."""

BASES: dict[str, str] = {"docs/adding_a_reward.md": RECIPE}
"""By page: the keys, as YAML, that its snippets of recipes take for granted, not ``BASE``."""

_TESTS = ":".join(
    f"{ROOT}/{folder}" for folder in ("", "tests", "tests/support", "tests/distributed")
)
PROOFS: dict[str, str] = {
    "docs/adding_a_reward.md": "python mppo/train.py --config snippet.yaml "
    "trainer.default_local_dir=run trainer.total_training_steps=1 trainer.save_freq=-1 "
    "&& grep -q reward/arithmetic/correct/mean run/metrics.jsonl",
    "docs/adding_a_family.md": f"PYTHONPATH={_TESTS} {sys.executable} "
    f"{ROOT}/tests/pages/family_check.py ernie.py && "
    "OPTIONS='--config small.yaml trainer.plugins=[ernie.py] trainer.total_training_steps=1 "
    "trainer.save_freq=-1 trainer.default_local_dir=run' && python mppo/plan.py $OPTIONS && "
    "python mppo/train.py $OPTIONS && python mppo/evaluate.py $OPTIONS model.path=run/actor && "
    "python -m checkpoints_convert hf-to-megatron --plugin ernie.py --hf small --megatron made",
}
"""By page: a command that shows, after all blocks, that the page's example works."""

NAMES: dict[str, str] = {
    "docs/adding_a_family.md": "from types import SimpleNamespace\n"
    "from mppo.weights.table_rows import Row\nshape = SimpleNamespace(head_dim=8)\n",
    "docs/data_and_rewards.md": "NEWLINE = 13\ndef check_step(text, number):\n    return 0.5\n",
}
"""By page: Python that defines the names which its snippets take for granted."""

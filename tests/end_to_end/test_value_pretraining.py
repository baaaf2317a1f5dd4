"""Value pretraining from dumps, and runs that start from the critic, in one process: with a value
of one number and with a histogram."""

from __future__ import annotations

import os
import subprocess
import sys

from launched_run import QUIET

PROGRAM = """
import json
import sys
from pathlib import Path
import torch
import mppo
from checkpoints_convert.commands import megatron_to_hf
from checkpoints_convert.job import Ranks
from mppo.hub.builtin import resolve_model
from mppo.weights.hf.input_folder import HFFolder

def recipe(name, *more):
    return mppo.load(
        {
            "model": {"path": "builtin:tiny", "dtype": "float32"},
            "data": {"task": "sort_digits", "task_kwargs": {"min_length": 2, "max_length": 3},
                     "train_size": 192, "val_size": 2, "train_batch_size": 32,
                     "max_prompt_length": 24, "max_response_length": 4},
            "actor": {"ppo_mini_batch_size": 32, "ppo_micro_batch_size_per_gpu": 32},
            "critic": {"ppo_micro_batch_size_per_gpu": 32, "ppo_mini_batch_size": 8,
                       "ppo_epochs": 2, "optim": {"lr": 2e-3}},
            "algorithm": {"lam_value": 1.0},
            "trainer": {"val_before_train": False, "console": "quiet", "export_hf": False,
                        "default_local_dir": f"{sys.argv[1]}/{name}"},
        },
        *more,
    )

def reward(data_source, solution_str, ground_truth, extra_info):
    return float(sum(map(str.isdigit, str(ground_truth))) == 3)  # a prompt has 2 or 3 digits

root = Path(sys.argv[1])
short = "trainer.total_training_steps="
mppo.train(recipe("dumped", short + "6", "trainer.dump_rollouts=true"), reward=reward)
stage = ("trainer.stage=value_pretraining", f"trainer.replay={root}/dumped",
         "trainer.export_hf=true", "trainer.save_freq=1")

gate = "trainer.value_gate={explained_var: 0.99, batches: 2}"
bins = ("critic.value_loss=hl_gauss", "critic.hl_gauss.bins=21")
failed = mppo.train(recipe("strict", *stage, *bins, gate, short + "6"), reward=reward)
rows = mppo.read_run(failed.folder).metrics
assert failed.steps == 6 and failed.gate_held is False
updated = ["critic/grad_norm" in row for row in rows]
assert updated == [True, True, True, True, False, False], "the last steps are held out"
assert all("actor/grad_norm" not in row and row["lr"] == 2e-3 for row in rows)
assert not (failed.folder / "actor").exists(), "the actor is as it was"
assert all(row["critic/vf_outside_range"] == 0 for row in rows[:4]), "returns of 0 and 1"
assert all(0 <= row["critic/values/min"] <= row["critic/values/max"] <= 1 for row in rows)
again = mppo.train(recipe("strict", *stage, *bins, gate, short + "6"), reward=reward)
assert again.steps == 6 and again.gate_held is False, "a finished run says it again"

exported = failed.folder / "critic"
assert json.loads((exported / "config.json").read_text())["value_bins"] == 21
saved, converted = failed.folder / "checkpoints/global_step_6/critic", root / "converted"
megatron_to_hf(saved, converted, Ranks(), resolve_model("builtin:tiny"))
heads = [HFFolder(folder).read("score.weight") for folder in (exported, converted)]
assert heads[0].shape[0] == 21 and torch.equal(*heads)
assert json.loads((converted / "config.json").read_text())["value_bins"] == 21
going_on = (short + "1", f"critic.path={exported}")
same = mppo.train(recipe("bins", *going_on, *bins), reward=reward)
assert 0 <= same.metrics["critic/values/min"] <= same.metrics["critic/values/max"] <= 1
try:
    mppo.train(recipe("one_number", *going_on), reward=reward)
except ValueError as error:
    assert "a histogram of values" in str(error), error
else:
    raise AssertionError("the heads differ")

gate = "trainer.value_gate={explained_var: 0.2, batches: 2}"
held = mppo.train(recipe("values", *stage, gate, "trainer.total_epochs=20"), reward=reward)
rows = mppo.read_run(held.folder).metrics
assert held.gate_held and held.steps < 120 and held.steps % 6 in (5, 0), held
assert held.metrics["critic/gate_batches"] == 2
for row in rows[-1:]:
    assert min(row["critic/vf_explained_var"], row["critic/vf_explained_var_by_episode"]) >= 0.2
assert mppo.read_run(held.folder).status.status == "finished"

ppo = mppo.train(recipe("ppo", short + "1", f"critic.path={held.folder}/critic"), reward=reward)
assert ppo.metrics["critic/vf_explained_var"] > 0.1, ppo.metrics["critic/vf_explained_var"]
print("done")
"""


def test_a_critic_is_trained_until_the_gate_holds_and_a_run_starts_from_it(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True, text=True, timeout=500, env={**os.environ, **QUIET},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    told = result.stdout + result.stderr
    assert "the value gate does not hold" in told
    assert "the value gate holds after 2" in told

"""Runs through the Python API: several in one process, and one on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from launched_run import QUIET, LaunchedRun, torchrun

RECIPE = """
import sys
import mppo

def recipe(name, *more):
    return mppo.load(
        {
            "model": {"path": "builtin:tiny", "dtype": "float32"},
            "data": {"task": "arithmetic", "train_size": 16, "val_size": 2, "train_batch_size": 4,
                     "max_prompt_length": 16, "max_response_length": 5},
            "actor": {"ppo_mini_batch_size": 4},
            "trainer": {"total_training_steps": 2, "val_before_train": False, "dump_rollouts": True,
                        "export_hf": False, "console": "quiet",
                        "default_local_dir": f"{sys.argv[1]}/{name}"},
        },
        *more,
    )
"""

ONE_PROCESS = """
import json, os

seen = {"pids": set(), "steps": [], "batches": [], "ends": 0}

class Watch:
    def on_step(self, step, metrics):
        seen["steps"].append((step, metrics["reward/arithmetic/length/mean"]))
    def on_batch(self, batch):
        seen["batches"].append(batch.scores_B.tolist())
    def on_end(self):
        seen["ends"] += 1

def make_reward(scale):
    def score(data_source, solution_str, ground_truth, extra_info):
        seen["pids"].add(os.getpid())
        return {"score": scale * len(solution_str), "length": len(solution_str)}
    return score

import gc
gc.set_threshold(901, 7, 7)
reward = make_reward(0.5)
result = mppo.train(recipe("one"), reward=reward, callbacks=[Watch()])
run = mppo.read_run(result.folder)
assert seen["pids"] == {os.getpid()} and seen["ends"] == 1
assert [step for step, _ in seen["steps"]] == [1, 2] == list(run.dumps)
last = run.metrics[-1]
assert result.steps == last.pop("step") == 2 and result.metrics.keys() == last.keys()
assert result.metrics["critic/score/mean"] == last["critic/score/mean"]
assert seen["batches"][1] == [row.score for row in run.dump(2).rows]
assert run.status.status == "finished" and [e.kind for e in run.events] == ["start", "end"]
assert run.samples[0]["step"] == 1

again = mppo.train(recipe("one"), reward=reward)
assert again.steps == 2 and again.metrics.keys() == last.keys() and seen["ends"] == 1

def broken(data_source, solution_str, ground_truth, extra_info):
    return {}["missing"]

async def later(data_sources, solution_strs, ground_truths, extra_infos):
    return [1.0] * len(solution_strs)

class Agent:
    def __init__(self, bonus=0.0):
        self.bonus = bonus
    async def __call__(self, conversation):
        if conversation.is_last:
            return {"reward": 1.0 + self.bonus}
        return "more"

class Broken:
    def on_batch(self, batch):
        raise RuntimeError("no such thing")

faults = []
for name, more in {"broken": {"reward": broken}, "callback": {"callbacks": [Broken()]}}.items():
    try:
        mppo.train(recipe(name), **more)
    except Exception as error:
        faults.append(f"{type(error).__name__}: {error}")
found = mppo.train(recipe("async"), reward=later)
assert found.metrics["critic/score/mean"] == 1.0
try:
    mppo.train(recipe("parameters"), reward=lambda response: 1.0)
except mppo.ConfigError as error:
    faults.append(error.issues[0].why)
assert gc.get_threshold() == (901, 7, 7) and gc.get_freeze_count() == 0, "as the program left them"
talks = recipe("agent", "rollout.agent={path: x:y, arguments: {bonus: 0.5}}", "reward.on_error=0")
found = mppo.train(talks, agent=Agent)
assert found.metrics["critic/score/mean"] == 1.5
print(json.dumps(faults))
"""


def test_one_process_trains_several_times_with_its_own_functions(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(RECIPE + ONE_PROCESS)
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True, text=True, timeout=500, env={**os.environ, **QUIET},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    reward, callback, why = json.loads(result.stdout.splitlines()[-1])
    assert reward.startswith("ScoringError: ")
    assert "the reward function __main__:broken failed on prompt " in reward
    assert "KeyError: 'missing' (program.py, line " in reward
    assert callback.startswith("InputError: on_batch of the callback Broken failed: RuntimeError: ")
    assert "its parameters do not fit" in why


TWO_RANKS = """
class Watch:
    def on_step(self, step, metrics):
        import torch.distributed as dist
        print(f"rank {dist.get_rank()} step {step}\\n", end="", flush=True)
        if len(sys.argv) > 2 and dist.get_rank() == 1:
            raise ValueError("only here")

layout = ("actor.megatron.tensor_model_parallel_size=2",)
result = mppo.train(recipe("two", *layout), reward=lambda data_source, solution_str, ground_truth,
                    extra_info: 1.0, callbacks=[Watch()])
print(f"result {result.steps} {result.metrics['critic/score/mean']}\\n", end="", flush=True)
"""
"""Each line is one write: those of two ranks must not mix."""


@pytest.mark.distributed
def test_a_launcher_starts_it_on_two_ranks(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(RECIPE + TWO_RANKS)
    result = subprocess.run(
        [*torchrun(), str(script), str(tmp_path)],
        capture_output=True, text=True, timeout=500, env={**os.environ, **QUIET},
    )  # fmt: skip
    assert {"rank 0 step 1", "rank 1 step 1"} <= set(result.stdout.splitlines())
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("result 2 1.0") == 2


@pytest.mark.distributed
def test_a_callback_that_fails_on_one_rank_ends_both(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(RECIPE + TWO_RANKS)
    argv = [str(script), str(tmp_path), "fail"]
    run = LaunchedRun(tmp_path / "outputs", program="script_rank", argv=argv)
    assert all(run.codes()), run.texts()
    for rank in range(2):
        assert f"rank {rank} step 1" in run.text(rank).splitlines()
    what = "failed while on_step: on_step of the callback Watch failed: ValueError: only here"
    assert f"mppo: rank 1 of 2 {what} (program.py, line " in run.text(1)


PLUGIN = """
import mppo

@mppo.register.policy_loss("whole")
def whole(inputs):
    return inputs.logprobs_T

@mppo.register.metric("broken")
def broken(data):
    return data.scored.scores_B[10**6]
"""
FAULTS = {
    "actor.policy_loss.loss_mode=whole": "the policy loss 'whole' returned [torch.Size([",
    "actor.policy_loss.loss_mode=plain": "the metric 'broken' failed: IndexError: index 1000000 is "
    "out of bounds for dimension 0 with size 4 (my_plugin.py, line 10); correct it",
}


@pytest.mark.parametrize(("setting", "message"), FAULTS.items(), ids=["result", "exception"])
def test_a_faulty_function_of_a_plugin_ends_the_run_as_the_users_fault(setting, message, tmp_path):
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    script = tmp_path / "program.py"
    call = f"mppo.train(recipe('run', 'trainer.plugins=my_plugin.py', {setting!r}))"
    script.write_text(RECIPE + f"try:\n    {call}\nexcept mppo.InputError as error: print(error)")
    argv = [str(script), str(tmp_path)]
    run = LaunchedRun(tmp_path / "outputs", program="script_rank", argv=argv, world=1)
    assert run.codes() == [0], run.texts()
    text = run.text(0)
    assert text.splitlines()[-1].startswith(message)
    assert text.count(message) == 2, "the run reports it, and raises it"
    assert "Traceback" not in text

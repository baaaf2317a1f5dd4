"""Scores of a model folder, without training."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import reward_functions
from launched_run import LaunchedRun
from length_judge import length_judge

from mppo.evaluate import main

TEMPERATURE = "rollout.val_kwargs.temperature=1.0"
ROOT = Path(__file__).parents[2]


def test_a_model_folder_is_scored_on_two_ranks(tmp_path):
    out = tmp_path / "scores.json"
    arguments = [
        "--config", str(ROOT / "recipes" / "tiny_cpu_tp2_pp2.yaml"), "--out", str(out),
        "data.val_size=5", "trainer.n_gpus_per_node=null",
        f"rollout.stop_token_ids={list(range(260))}",
        "actor.megatron.pipeline_model_parallel_size=1",
        "critic.megatron.tensor_model_parallel_size=1",
        "ref.megatron.pipeline_model_parallel_size=1",
    ]  # fmt: skip
    run = LaunchedRun(tmp_path, program="mppo.evaluate", argv=arguments)
    assert run.codes() == [0, 0], run.texts()
    scores = json.loads(out.read_text())
    assert scores["prompts"] == 5
    assert scores["val/reward"] == scores["val-core/reverse/reward/mean"]
    assert 0 <= scores["val/reward"] <= 1
    # every token ends a response
    assert scores["val/response_length/mean"] == 1
    assert scores["val/response_length/clip_ratio"] == 0
    assert json.dumps(scores) in run.text(0)


@pytest.mark.parametrize(("settings", "code"), [(["reward.on_error=0"], 0), ([], 1)])
def test_unscored_responses_are_counted_or_reported_in_one_message(settings, code, tmp_path):
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    arguments = [
        "--config", str(empty), "data.task=reverse", "data.val_size=3",
        "data.max_response_length=4", "reward.name=function",
        f"reward.function={reward_functions.__file__}:divide", "reward.kwargs.by=0", *settings,
    ]  # fmt: skip
    run = LaunchedRun(tmp_path, program="mppo.evaluate", argv=arguments, world=1)
    assert run.codes() == [code], run.texts()
    if code:
        assert "ZeroDivisionError: division by zero" in run.text(0)
        assert "Traceback" not in run.text(0)
    else:
        scores = json.loads(run.text(0).splitlines()[-1])
        assert (scores["val/reward"], scores["val/reward_errors"]) == (0, 3)


def test_a_rank_that_dies_ends_the_evaluation(tmp_path):
    recipe, marker = tmp_path / "recipe.yaml", tmp_path / "marker"
    recipe.write_text(
        "model: {path: 'builtin:tiny', dtype: float32}\n"
        "data: {task: reverse, val_size: 4, max_response_length: 4}\n"
        f"reward: {{name: function, function: '{reward_functions.__file__}:stuck', timeout_s: 900, "
        f"kwargs: {{marker: '{marker}'}}}}\n"
        f"trainer: {{heartbeat_timeout_s: 20, default_local_dir: '{tmp_path}'}}\n"
    )
    run = LaunchedRun(tmp_path, program="mppo.evaluate", argv=["--config", str(recipe)])
    run.until(marker.exists)
    run.send(1, signal.SIGKILL)
    assert run.code(0, 120) == 1, run.texts()
    assert "rank 1 of 2" in run.text(0)
    run.kill()


def test_a_missing_model_is_reported_in_one_message(capfd):
    recipe = ROOT / "recipes" / "smollm2_135m_cpu.yaml"
    assert main(["--config", str(recipe), "model.path=nowhere/model"]) == 2
    message = capfd.readouterr().err
    assert "no such folder" in message
    assert "Traceback" not in message


def test_all_rows_of_validation_files_are_used_and_counted_by_source(tmp_path, capfd):
    rows = [{"prompt": "1+2=", "answer": "3"}]
    for name, count in (("gsm8k", 70), ("math", 3)):
        text = "".join(json.dumps(row) + "\n" for row in rows * count)
        (tmp_path / f"{name}.jsonl").write_text(text)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {path: 'builtin:tiny', dtype: float32}\n"
        f"data: {{train_files: [{tmp_path}/gsm8k.jsonl], max_prompt_length: 16, "
        f"max_response_length: 2, val_files: [{tmp_path}/gsm8k.jsonl, {tmp_path}/math.jsonl]}}\n"
        "reward: {verifier: exact}\n"
    )
    samples, sampling = tmp_path / "new" / "samples.jsonl", ["rollout.val_kwargs.n=2", TEMPERATURE]
    options = ["--samples", str(samples), "data.val_batch_size=40"]
    assert main(["--config", str(recipe), *options, *sampling]) == 0
    shown = capfd.readouterr()
    assert "mppo: validation: 73 (gsm8k 70, math 3)\n" in shown.err
    assert "mppo: 40 of 73 prompts answered\nmppo: 73 of 73 prompts answered\n" in shown.err
    heads, *table = [line for line in shown.err.splitlines() if "  " in line][-3:]
    assert heads.split()[:5] == ["mppo:", "data", "source", "acc/maj@2", "acc/pass@1"]
    assert [line.split()[1] for line in table] == ["gsm8k", "math"]
    lines = [json.loads(line) for line in samples.open()]
    found = [(line["data_source"], line["index"], line["sample"]) for line in lines]
    assert found[:2] + found[-1:] == [("gsm8k", 0, 0), ("gsm8k", 0, 1), ("math", 72, 1)]
    scores = json.loads(shown.out.splitlines()[-1])
    assert scores["val-aux/math/acc/pass@1"] == sum(line["right"] for line in lines[-6:]) / 6
    counted = {name: scores[name] for name in ("prompts", "prompts/gsm8k", "prompts/math")}
    assert counted == {"prompts": 73, "prompts/gsm8k": 70, "prompts/math": 3}
    assert main(["--config", str(recipe), "data.val_size=0"]) == 2
    assert "there are no validation prompts" in capfd.readouterr().err
    assert main(["--config", str(recipe), "--out", str(recipe / "scores.json")]) == 2
    assert "its folder cannot be made (File exists)" in capfd.readouterr().err


def test_a_judge_compares_the_responses_with_the_ground_truths(tmp_path):
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    arguments = [
        "--config", str(empty), "data.task=reverse", "data.val_size=3",
        "data.max_response_length=4", "--judge-model", "length",
    ]  # fmt: skip
    with length_judge() as url:
        run = LaunchedRun(
            tmp_path, program="mppo.evaluate", argv=[*arguments, "--judge", url], world=1
        )
        assert run.codes() == [0], run.texts()
    scores = json.loads(run.text(0).splitlines()[-1])
    pairs = [scores[f"judge/{name}"] for name in ("wins", "ties", "losses")]
    assert (sum(pairs), scores["judge/failures"]) == (3, 0)
    assert scores["judge/win_rate"] == pytest.approx((pairs[0] + pairs[1] / 2) / 3)
    assert "judge: win rate" in run.text(0)

"""Scores of a model folder, without training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mppo.evaluate import main

TEMPERATURE = "rollout.val_kwargs.temperature=1.0"
ROOT = Path(__file__).parents[2]


def test_a_model_folder_is_scored_on_two_ranks(tmp_path):
    out = tmp_path / "scores.json"
    result = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
            str(ROOT / "mppo" / "evaluate.py"),
            "--config", str(ROOT / "recipes" / "tiny_cpu_tp2_pp2.yaml"), "--out", str(out),
            "data.val_size=5", "trainer.n_gpus_per_node=null",
            f"rollout.stop_token_ids={list(range(260))}",
            "actor.megatron.pipeline_model_parallel_size=1",
            "critic.megatron.tensor_model_parallel_size=1",
            "ref.megatron.pipeline_model_parallel_size=1",
        ],
        capture_output=True, text=True, timeout=500, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    scores = json.loads(out.read_text())
    assert scores["prompts"] == 5
    assert scores["reward/mean"] == scores["reward/reverse"]
    assert 0 <= scores["reward/mean"] <= 1
    # every token ends a response
    assert scores["response_length/mean"] == 1
    assert scores["response_length/clip_ratio"] == 0
    assert json.dumps(scores) in result.stdout


def divide(data_source, solution_str, ground_truth, extra_info, by):
    return {"score": 1 / by, "acc": True}


@pytest.mark.parametrize(("settings", "code"), [(["reward.on_error=0"], 0), ([], 1)])
def test_unscored_responses_are_counted_or_reported_in_one_message(settings, code, tmp_path):
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    result = subprocess.run(
        [
            sys.executable, str(ROOT / "mppo" / "evaluate.py"), "--config", str(empty),
            "data.task=reverse", "data.val_size=3", "data.max_response_length=4",
            "reward.name=function", f"reward.function={__file__}:divide", "reward.kwargs.by=0",
            *settings,
        ],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == code, result.stderr
    if code:
        assert "ZeroDivisionError: division by zero" in result.stderr
        assert "Traceback" not in result.stderr
    else:
        scores = json.loads(result.stdout)
        assert (scores["reward/mean"], scores["reward/errors"]) == (0, 3)


def test_a_missing_model_is_reported_in_one_message(tmp_path):
    result = subprocess.run(
        [
            sys.executable, str(ROOT / "mppo" / "evaluate.py"),
            "--config", str(ROOT / "recipes" / "smollm2_135m_cpu.yaml"),
            "model.path=nowhere/model",
        ],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 2
    assert "no such folder" in result.stderr
    assert "Traceback" not in result.stderr


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
    assert main(["--config", str(recipe), "rollout.val_kwargs.n=2", TEMPERATURE]) == 0
    shown = capfd.readouterr()
    assert "mppo: validation: 73 (gsm8k 70, math 3)\n" in shown.err
    scores = json.loads(shown.out.splitlines()[-1])
    counted = {name: scores[name] for name in ("prompts", "prompts/gsm8k", "prompts/math")}
    assert counted == {"prompts": 73, "prompts/gsm8k": 70, "prompts/math": 3}
    assert main(["--config", str(recipe), "data.val_size=0"]) == 2
    assert "there are no validation prompts" in capfd.readouterr().err

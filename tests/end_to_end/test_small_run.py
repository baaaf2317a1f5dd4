"""The output of a run of two steps: console, metrics, samples, checkpoints, export."""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import reward_functions
import torch
from ranks import start_ranks

COMMON = [
    "model.dtype=float32",
    "data.task=arithmetic",
    "data.val_size=4",
    "data.max_prompt_length=16",
    "data.max_response_length=6",
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=4",
    "reward.name=function",
    f"reward.function={reward_functions.__file__}:characters",
    "rollout.n=2",
    "trainer.total_training_steps=2",
    "trainer.test_freq=1",
    "trainer.export_hf=false",
]


def grade(data_source, solution_str, ground_truth, extra_info, bad=None):
    """A function in verl's form: a score of 0.5, half of it for the first token, with further
    numbers; it raises on the row ``bad``."""
    if extra_info["index"] == bad:
        return {"score": 1 / len(ground_truth)}
    numbers = {"acc": True, "format": np.float32(0.25), "pred": "17"}
    return {"score": torch.tensor(0.25), "token_rewards": [(0, 0.25)], **numbers}


def _rank(rank: int, arguments: list[str], environment: dict[str, str], code: int) -> None:
    warnings.simplefilter("ignore")
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    from mppo.train import main

    assert main(arguments) == code


def train(run_dir: Path, *overrides: str, code: int = 0, world: int = 1) -> list[dict]:
    """The metrics of each step, including those before the first step."""
    from mppo.parallel.addresses import free_port

    environment = {
        "MPPO_CACHE": os.environ["MPPO_CACHE"],
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    folder = f"trainer.default_local_dir={run_dir}"
    start_ranks(_rank, ([*COMMON, folder, *overrides], environment, code), world)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]


def test_greedy_and_validation_responses_end_as_the_sampled_ones_do(tmp_path):
    # every token ends a response; a policy that keeps one token samples the greedy response
    rows = train(
        tmp_path,
        "algorithm.adv_estimator=remax",
        "algorithm.normalize_scores={mode: given, mean: 3, std: 0.5}",
        "rollout.top_k=1",
        f"rollout.stop_token_ids={list(range(260))}",
    )
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["response_length/max"] == 1
        assert row["critic/advantages/min"] == row["critic/advantages/max"] == 0
    assert all(row["val/reward"] <= 1 for row in rows)
    assert all("timing_s/testing" in row for row in rows)
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").open()]
    assert {sample["step"] for sample in samples} == {1, 2}
    for sample in samples:
        first, second = map(int, re.findall(r"\d+", sample["prompt"]))
        assert int(sample["ground_truth"]) == first + second


def test_no_sample_is_shown_or_stored_with_sample_table_rows_0(tmp_path):
    train(tmp_path, "trainer.sample_table_rows=0")
    assert not (tmp_path / "samples.jsonl").exists()
    assert "Samples at" not in (tmp_path / "report.md").read_text()


def graded(tmp_path: Path) -> list[str]:
    """Settings of a run whose rows are as verl's; step 2 trains on those from 4 on."""
    for name, first, count in (("train", 0, 8), ("val", 100, 2)):
        rows = [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{first + i}="}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": first + i, "split": name},
            }
            for i in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        "data.task=null",
        f"data.train_files=[{tmp_path}/train.jsonl]",
        f"data.val_files=[{tmp_path}/val.jsonl]",
        "data.answer_key=reward_model.ground_truth",
        "data.shuffle=false",
        f"reward.function={__file__}:grade",
        "trainer.val_before_train=false",
    ]


def test_numbers_that_come_with_scores_are_logged_by_data_source(tmp_path):
    for row in train(tmp_path / "run", *graded(tmp_path)):
        assert row["critic/score/mean"] == row["val/reward"] == 0.5
        assert row["reward/openai/gsm8k/acc/mean"] == 1
        assert row["reward/openai/gsm8k/format/mean"] == 0.25
        assert row["val-core/openai/gsm8k/reward/mean"] == 0.5
        assert row["val-core/openai/gsm8k/acc/mean"] == 1
        assert row["val-aux/openai/gsm8k/format/mean"] == 0.25
        assert row["reward/errors"] == row["val/reward_errors"] == 0
        assert not [name for name in row if "/pred/" in name]


@pytest.mark.parametrize(("bad", "world"), [(5, 2), (100, 1)])
def test_a_run_that_a_reward_function_ends_is_resumed_after_the_last_step(tmp_path, bad, world):
    settings, run_dir = graded(tmp_path), tmp_path / "run"
    failed = train(run_dir, *settings, f"reward.kwargs.bad={bad}", code=1, world=world)
    assert len(failed) == 1
    assert (run_dir / "checkpoints" / "global_step_1").is_dir()
    assert [row["step"] for row in train(run_dir, *settings, world=world)] == [1, 2]
    undisturbed = train(tmp_path / "undisturbed", *settings, world=world)
    resumed = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert resumed[-1]["actor/pg_loss"] == undisturbed[-1]["actor/pg_loss"]


def test_on_error_gives_a_failed_response_its_score(tmp_path):
    settings = [*graded(tmp_path), "reward.on_error=-1", "reward.kwargs.bad=5"]
    first, second = train(tmp_path / "run", *settings)
    assert (first["reward/errors"], first["critic/score/min"]) == (0, 0.5)
    assert (second["reward/errors"], second["critic/score/min"]) == (2, -1)
    assert second["critic/score/mean"] == (0.5 * 6 - 2) / 8

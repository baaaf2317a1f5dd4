"""What a run of two steps on one process says of itself: metrics, samples, report."""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path

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
    f"reward.function={__file__}:characters",
    "rollout.n=2",
    "trainer.total_training_steps=2",
    "trainer.test_freq=1",
    "trainer.export_hf=false",
]


def characters(data_source, solution_str, ground_truth, extra_info):
    """A reward that knows where a response ended."""
    return len(solution_str)


def _rank(rank: int, arguments: list[str], environment: dict[str, str]) -> None:
    warnings.simplefilter("ignore")
    os.environ |= environment
    torch.set_num_threads(1)
    from mppo.train import main

    assert main(arguments) == 0


def train(run_dir: Path, *overrides: str) -> list[dict]:
    """The metrics of each step, that before the first among them."""
    cache = {"MPPO_CACHE": os.environ["MPPO_CACHE"]}
    folder = f"trainer.default_local_dir={run_dir}"
    start_ranks(_rank, ([*COMMON, folder, *overrides], cache), 1)
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
    assert all(row["timing_s/testing"] > 0 for row in rows)
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").open()]
    assert {sample["step"] for sample in samples} == {1, 2}
    for sample in samples:
        first, second = map(int, re.findall(r"\d+", sample["prompt"]))
        assert int(sample["ground_truth"]) == first + second


def test_no_sample_is_shown_or_stored_where_none_is_asked_for(tmp_path):
    train(tmp_path, "trainer.sample_table_rows=0")
    assert not (tmp_path / "samples.jsonl").exists()
    assert "Samples at" not in (tmp_path / "report.md").read_text()

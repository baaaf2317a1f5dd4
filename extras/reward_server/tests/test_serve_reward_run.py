"""A run learns from the scores of ``mppo-serve-reward`` in another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from mppo.train import main as train

KEY = "a-key-of-this-test"
RECIPE = """
model: {path: "builtin:tiny", dtype: float32}
data:
  task: reverse
  train_batch_size: 4
  val_size: 2
  max_prompt_length: 32
  max_response_length: 8
actor: {ppo_mini_batch_size: 4}
reward: {name: remote, kwargs: {api_key_env: MPPO_REWARD_API_KEY}}
trainer: {total_training_steps: 1, val_before_train: true, logger: [jsonl]}
"""


@pytest.fixture
def address(monkeypatch):
    """The address of a server with the tiny reward model; it ends by SIGTERM."""
    monkeypatch.setenv("MPPO_REWARD_API_KEY", KEY)
    command = [sys.executable, "-m", "mppo_reward_server", "--model", "builtin:tiny-reward"]
    with subprocess.Popen(
        [*command, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MPPO_DEVICE": "cpu"},
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line.startswith("mppo: serving http://127.0.0.1:"), line
            yield line.split()[2].rstrip(",").removesuffix("/score")
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=60) == 0
        finally:
            server.kill()


@pytest.mark.server
def test_a_run_is_scored_by_a_served_reward_model(tmp_path, address):
    (tmp_path / "small.yaml").write_text(RECIPE)
    overrides = [f"trainer.default_local_dir={tmp_path}/run", f"reward.url={address}/score"]
    assert train(["--config", str(tmp_path / "small.yaml"), *overrides]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    scores = [row["critic/score/mean"] for row in rows if "critic/score/mean" in row]
    assert len(scores) == 1
    assert scores[0] != 0.0
    assert KEY not in "".join(p.read_text(errors="replace") for p in (tmp_path / "run").glob("*.*"))

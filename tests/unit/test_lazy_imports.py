"""Help and errors of a recipe are printed before any heavy import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "megatron", "transformers", "sglang", "numpy", "rich")
PROGRAM = f"""
import json, sys
sys.argv = ["mppo-train", *json.loads(sys.argv[1])]
from mppo.train import main
try:
    code = main()
except SystemExit as end:
    code = end.code
print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


CALLS = [
    (["--help"], 0),
    ([], 2),
    (["--world-size", "3"], 2),
    (["--trainer.seed=3"], 2),
    (["--config", "nowhere.yaml"], 2),
    (["data.task=arithmetic", "actor.ppo_mini_batch=3"], 2),
    (["data.task=arithmetic", "rollout.temperature=0"], 2),
    (["data.train_files=[nowhere.jsonl]"], 2),
    (["data.task=arithmetic", "model.path=Qwen/Qwen2.5-0.5B-Instruct"], 2),
    (["data.task=arithmetic", "actor_rollout_ref.rollout.name=vllm"], 2),
]


@pytest.mark.parametrize(("arguments", "code"), CALLS, ids=[" ".join(call) for call, _ in CALLS])
def test_nothing_heavy_is_imported_to_tell_it(arguments, code, tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(arguments)],
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == [code, []]

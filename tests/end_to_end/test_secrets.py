"""A run's output and files contain no secret and are private, also if it fails."""

from __future__ import annotations

import stat
from pathlib import Path

from launched_run import LaunchedRun

HUB = "hf_qWeRtYuIoPaSdFgHjK0123"
PLAIN = "open5esame7cave"
FORGE = "ghp_0123456789abcdefghijABCDEFGHIJ"
FUNCTION = """
calls = 0

def score(data_source, solution_str, ground_truth, extra_info, hub_token, note):
    global calls
    calls += 1
    if calls > 8:
        raise ValueError(f"cannot log in with {note}, token={hub_token}")
    return 1.0
"""


def test_a_run_that_fails_shows_no_secret_of_its_recipe_and_leaves_private_files(tmp_path):
    run_dir, function = tmp_path / "run", tmp_path / "my_rewards.py"
    function.write_text(FUNCTION)
    settings = (
        "reward.name=function",
        f"reward.function={function}:score",
        f"reward.kwargs={{hub_token: {PLAIN}, note: {HUB}}}",
        f"trainer.project_name={FORGE}",
        "trainer.dump_rollouts=true",
    )
    run = LaunchedRun(run_dir, settings)
    assert run.codes() == [1, 1], run.texts()
    assert "cannot log in with ***, token=***" in run.texts()
    written = [path for path in run_dir.rglob("*") if path.is_file()]
    names = {path.name for path in written}
    assert {"recipe.yaml", "metrics.jsonl", "report.md", "report.html", "output_0.txt"} <= names
    assert {"events.jsonl", "step.json", "rank_1.safetensors"} <= names
    assert any("global_step_1" in str(path) for path in written), "a checkpoint holds the recipe"
    for secret in (HUB, PLAIN, FORGE):
        assert [path for path in written if secret.encode() in path.read_bytes()] == []
    others = [path for path in run_dir.rglob("*") if path.parent != run_dir or path.is_dir()]
    others += [run_dir / "recipe.yaml", run_dir / "metrics.jsonl", run_dir / ".lock"]
    assert [path for path in others if _seen_by_others(path)] == []


def _seen_by_others(path: Path) -> bool:
    return bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))

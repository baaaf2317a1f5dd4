"""Environment variables: all are in the table, and unknown ones are reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mppo.recipe.variables import PROGRAM_VARIABLES, SCRIPT_VARIABLES, unknown_variables
from mppo.train import main

ROOT = Path(__file__).parents[2]
WORD = re.compile(r"\bMPPO_[A-Z_]+")


def words(*patterns: str) -> set[str]:
    """Every variable that files name."""
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    table = ROOT / "mppo" / "recipe" / "variables.py"
    return {word for path in paths if path != table for word in WORD.findall(path.read_text())}


def test_the_tables_hold_every_variable_and_no_other():
    in_code = words("mppo/**/*.py", "checkpoints_convert/**/*.py", "extras/*/mppo_*/**/*.py")
    assert in_code == PROGRAM_VARIABLES.keys()
    assert words("slurm/*") - in_code == SCRIPT_VARIABLES


def test_the_documentation_lists_the_variables():
    page = (ROOT / "docs" / "configuration.md").read_text()
    for name, meaning in PROGRAM_VARIABLES.items():
        assert f"| `{name}` | {meaning} |" in page


def test_an_unknown_variable_is_reported_with_the_nearest_name():
    lines = unknown_variables({"MPPO_DEVCE": "cpu", "MPPO_PYTHON": "python3", "HOME": "/"})
    assert lines == ["the environment variable MPPO_DEVCE is not read: did you mean MPPO_DEVICE?"]
    assert "known variables: MPPO_CACHE, " in unknown_variables({"MPPO_X": "1"})[0]


def test_a_run_reports_unknown_variables_and_repeated_keys(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MPPO_CACH", str(tmp_path))
    data = ["data.task=arithmetic", "data.max_prompt_length=64", "data.max_response_length=64"]
    twice = ["actor.optim.lr=1e-5", "actor_rollout_ref.actor.optim.lr=1e-6", "rollout.n=2"]
    assert main(["--dry-run", *data, *twice, "rollout.n=2"]) == 0
    reported = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mppo: ")]
    assert reported == [
        "mppo: the environment variable MPPO_CACH is not read: did you mean MPPO_CACHE?",
        "mppo: actor.optim.lr is given twice: 1e-5, then 1e-6; the last value is used",
    ]


@pytest.mark.parametrize(
    ("asked", "message"),
    [("gpu", "MPPO_DEVICE=gpu: choose cpu or cuda"), ("cuda", "MPPO_DEVICE=cuda, but ")],
)
def test_a_device_that_is_not_there_is_refused(asked, message, tmp_path, capsys, monkeypatch):
    if asked == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setenv("MPPO_DEVICE", asked)
    monkeypatch.chdir(tmp_path)
    lengths = ["data.max_prompt_length=32", "data.max_response_length=16"]
    assert main(["data.task=arithmetic", *lengths]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

"""The notebook of the documentation runs from its first to its last cell, as a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs/notebooks/first_run.ipynb"


def test_the_cells_train_and_read_the_run(tmp_path):
    runner = ROOT / "tests/support/notebook_cells.py"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    result = subprocess.run(
        [sys.executable, str(runner), str(NOTEBOOK)], cwd=tmp_path, capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "did you mean actor.optim.lr?" in result.stdout, "the mistake is told"
    assert "fits" in result.stdout
    assert result.stdout.splitlines()[-1] == str(Path("runs/notebook/report.html"))
    rows = (tmp_path / "runs/notebook/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows][-1] == 3
    assert (tmp_path / "runs/notebook/report.html").is_file()


def test_a_notebook_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(cell.get("outputs", []) == [] for cell in cells)
    assert all(cell.get("execution_count") is None for cell in cells)

"""A run laid over verl's curve: ``benchmarks/reference_curve.py``."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "reference_curve.py"
ACCURACY = "val-core/openai/gsm8k/reward/mean"


def lay_over(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_run_is_laid_over_verls_curve(tmp_path):
    rows = [{"step": 0, ACCURACY: 0.002}, {"step": 10, ACCURACY: 0.25, "critic/score/mean": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = lay_over(tmp_path, "--out", tmp_path / "curve.svg")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [ACCURACY, "0", "0.0008", "0.002"] in lines
    assert [ACCURACY, "10", "0.013", "0.25"] in lines
    assert [ACCURACY, "435", "0.5686", "-"] in lines
    assert ["critic/score/mean", "10", "0.031", "0.5"] in lines
    assert "<svg" in (tmp_path / "curve.svg").read_text()


def test_a_folder_without_metrics_is_refused(tmp_path):
    done = lay_over(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "metrics.jsonl is no file: name the folder of a run" in done.stderr

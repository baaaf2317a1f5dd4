"""Each tracker with its own package: numbers, samples, resuming, and no secrets."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mppo.config.trackers import EXTRAS
from mppo.report.console import SampleRow
from mppo.report.trackers.tracker import TrackedRun

SECRETS = ("open5esame7cave", "hf_qWeRtYuIoPaSdFgHjK0123", "h0tUrl9pass7word", "k3yOfTheGitRemote")
VARIABLE, TOKEN, PASSWORD, REMOTE = SECRETS
ROW = SampleRow("12+5=|", f"it is {TOKEN}", "17", "17", 1.0, "best")
PROGRAM = f"""
import json, math, sys
from pathlib import Path
from mppo.config.sections.trainer import TrainerConfig
from mppo.report.console import SampleRow
from mppo.report.reporter import Reporter
from mppo.safety.redact import redacted_output

name, folder, done, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
trainer = TrainerConfig(logger=(name,), project_name="project", experiment_name="run {TOKEN}")
kwargs = {{"api_key": "{VARIABLE}"}}
recipe = {{"reward": {{"url": "https://me:{PASSWORD}@host/x", "kwargs": kwargs}}}}
with redacted_output():
    reporter = Reporter(folder, trainer, recipe, 4, True)
    reporter.start(done)
    for step in range(done + 1, last + 1):
        if step == last:
            reporter.samples(step, [SampleRow(*json.loads(sys.argv[5]))])
        metrics = {{"critic/score/mean": step + done / 10, "val-core/a/acc/pass@4": math.nan}}
        reporter.log(step, metrics)
        print("a line of the console with token={VARIABLE}")
    reporter.close()
"""


@pytest.fixture(scope="module", params=EXTRAS)
def tracked(request, tmp_path_factory) -> tuple[str, Path]:
    """Name of a tracker, and the run folder after steps 1 to 3 and a resume after step 2."""
    name = request.param
    if importlib.util.find_spec(name) is None:
        pytest.skip(
            f'the optional package of the tracker is not installed: pip install "mppo[{name}]"'
        )
    work = tmp_path_factory.mktemp(name)
    git = ["git", "-C", str(work)]
    subprocess.run([*git, "init", "-q"], check=True)
    remote = f"https://me:{REMOTE}@forge.example/x.git"
    subprocess.run([*git, "remote", "add", "origin", remote], check=True)
    (work / "program.py").write_text(PROGRAM)
    environment = {
        **os.environ, "WANDB_MODE": "offline", "SWANLAB_MODE": "offline",
        "HOME": str(work / "home"), "SERVICE_API_KEY": VARIABLE,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    environment.pop("MLFLOW_TRACKING_URI", None)
    for done, last in ((0, 3), (2, 4)):
        steps = [str(done), str(last), json.dumps(ROW), f"reward.kwargs.api_key={VARIABLE}"]
        command = [sys.executable, "-W", "ignore", "program.py", name, str(work / "run"), *steps]
        found = subprocess.run(
            command, capture_output=True, text=True, cwd=work, env=environment, timeout=300
        )
        assert found.returncode == 0, found.stderr
    return name, work / "run"


def test_no_secret_reaches_a_tracker(tracked):
    name, folder = tracked
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent != folder]
    assert files, f"{name} keeps something in the run folder"
    for secret in SECRETS:
        assert [path for path in files if secret.encode() in path.read_bytes()] == []


def test_numbers_samples_and_the_identity_of_a_resumed_run_are_there(tracked):
    name, folder = tracked
    READERS[name](folder)


def read_tensorboard(folder: Path) -> None:
    loader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = loader.EventAccumulator(str(folder / "tensorboard")).Reload()
    values = [(event.step, event.value) for event in events.Scalars("critic/score/mean")]
    assert values == [(1, 1), (2, 2), (3, pytest.approx(3.2)), (4, pytest.approx(4.2))]
    text = events.Tensors("samples/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "| 12+5=\\| | it is \\*\\*\\* | 17 | 17 | 1.000 | best |" in text
    (*_, picture) = events.Images("reward_kl")
    assert (picture.step, picture.encoded_image_string[:4]) == (4, b"\x89PNG")


def read_mlflow(folder: Path) -> None:
    mlflow = importlib.import_module("mlflow")
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = mlflow.MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("project")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == json.loads((folder / "trackers.json").read_text())["mlflow"]
    assert (run.info.run_name, run.info.status) == ("run ***", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "critic/score/mean")
    assert [(one.step, one.value) for one in history] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (3, 3.2),
        (4, 4.2),
    ]
    assert math.isnan(run.data.metrics["val-core/a/acc/pass_at_4"])
    (path,) = folder.glob("mlflow/*/*/artifacts/samples/4.json")
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["prompt"], row["response"], row["ground truth"]) == ("12+5=|", "it is ***", "17")
    assert list(folder.glob("mlflow/*/*/artifacts/pictures/reward_kl.png"))


def read_wandb(folder: Path) -> None:
    identity = json.loads((folder / "trackers.json").read_text())["wandb"]
    runs = sorted(folder.glob(f"wandb/offline-run-*-{identity}"))
    assert len(runs) == 2
    assert all((run / f"run-{identity}.wandb").stat().st_size for run in runs)
    tables = [json.loads(p.read_text()) for run in runs for p in run.rglob("*.table.json")]
    assert len(tables) == 2
    for table in tables:
        assert table["columns"][2:] == ["ground truth", "answer", "score", "place"]
        assert table["data"] == [["12+5=|", "it is ***", "17", "17", "1.000", "best"]]
    content = (runs[1] / f"run-{identity}.wandb").read_bytes()
    assert b"critic/score/mean" in content
    assert b"4.2" in content
    assert list(runs[1].rglob("media/images/reward_kl*.png"))


def read_swanlab(folder: Path) -> None:
    identity = json.loads((folder / "trackers.json").read_text())["swanlab"]
    runs = sorted(folder.glob(f"swanlab/run-*-{identity}"))
    assert len(runs) == 2
    contents = [(run / f"run-{identity}.swanlab").read_bytes() for run in runs]
    assert all(b"critic/score/mean" in content for content in contents)
    texts = [path.read_text() for run in runs for path in run.rglob("media/text/*")]
    assert len(texts) == 2
    assert all("| it is \\*\\*\\* | 17 | 17 | 1.000 | best |" in text for text in texts)
    assert list(runs[1].rglob("media/image/*.png"))


READERS = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "wandb": read_wandb,
    "swanlab": read_swanlab,
}


def test_the_identity_of_a_run_is_kept_only_for_a_resume(tmp_path):
    first = TrackedRun(tmp_path, "project", "run", {}, 0)
    first.keep_id("wandb", "abc")
    first.keep_id("mlflow", "def")
    resumed = TrackedRun(tmp_path, "project", "run", {}, 3)
    assert (resumed.known_id("wandb"), resumed.known_id("mlflow")) == ("abc", "def")
    assert TrackedRun(tmp_path, "project", "run", {}, 0).known_id("wandb") is None
    (tmp_path / "trackers.json").write_text('{"wandb": 3, "mlf')
    assert resumed.known_id("wandb") is None

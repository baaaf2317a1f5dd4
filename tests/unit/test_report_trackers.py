"""Each tracker with its own package: numbers, samples, resuming, and no secrets."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_server import hostile_server, says

from mppo.recipe.errors import ConfigError
from mppo.recipe.sections.trainer import TrainerConfig
from mppo.recipe.trackers import EXTRAS
from mppo.report.console import SampleRow
from mppo.report.reporter import Reporter
from mppo.report.run_record import read_events
from mppo.report.trackers.retries import KEPT, TRIES, RetriedTracker
from mppo.report.trackers.tracker import TrackedRun

SECRETS = ("open5esame7cave", "hf_qWeRtYuIoPaSdFgHjK0123", "h0tUrl9pass7word", "k3yOfTheGitRemote")
VARIABLE, TOKEN, PASSWORD, REMOTE = SECRETS
SOURCES = ("a//b", "../..", "/", ".", "", "x\ud800", "\x1b[31m", "a\nb", "n" * 1000, "@", "é?")
"""Names of data sources, some of which no tracker accepts as they are."""
ROW = SampleRow("12+5=|", f"it is {TOKEN}", "17", "17", 1.0, "best")
PROGRAM = f"""
import json, math, sys
from pathlib import Path
from mppo.recipe.sections.trainer import TrainerConfig
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
        metrics |= {{f"val-core/{{source}}/mean": 0.5 for source in json.loads(sys.argv[6])}}
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
        texts = [json.dumps(ROW), json.dumps(SOURCES), f"reward.kwargs.api_key={VARIABLE}"]
        texts = [str(work / "run"), str(done), str(last), *texts]
        command = [sys.executable, "-W", "ignore", "program.py", name, *texts]
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


def test_no_metrics_name_makes_a_tracker_fail(tracked):
    name, folder = tracked
    events = read_events(folder)
    assert [event.kind for event in events] == ["end", "end"]
    assert [event.text for event in events if name in event.text] == []


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


class FlakyTracker:
    """A tracker that refuses some steps, and everything while it is away."""

    def __init__(self, bad: frozenset[int] = frozenset()) -> None:
        self.bad, self.away, self.steps = bad, False, []

    def log(self, step, metrics) -> None:
        if self.away or step in self.bad:
            raise RuntimeError(f"token=open5esame7cave \x1b[31m step {step}")
        self.steps.append(step)

    def samples(self, step, rows) -> None:
        self.log(step, {})

    def picture(self, step, path) -> None:
        self.log(step, {})

    def close(self) -> None:
        if self.away:
            raise OSError("cannot be reached")


def test_calls_of_a_tracker_that_was_away_are_sent_later_in_order():
    flaky, lines = FlakyTracker(), []
    subject = RetriedTracker("flaky", flaky, lines.append)
    for step in range(1, 41):
        flaky.away = 5 <= step < 9
        subject.log(step, {})
    subject.samples(41, [])
    subject.picture(42, Path("a.png"))
    subject.close()
    assert flaky.steps == list(range(1, 43))
    assert len(lines) == 3
    assert lines[0].startswith("flaky: step 5 is tried again (RuntimeError: token=***")
    assert all(line.isprintable() and VARIABLE not in line for line in lines)
    assert lines[1] == "flaky: works again"
    assert lines[2].endswith(f"{subject.failures} failures in this run, 0 calls were given up")


def test_a_call_that_a_tracker_always_refuses_is_given_up_and_the_others_are_sent():
    flaky, lines = FlakyTracker(frozenset({2, 40})), []
    subject = RetriedTracker("flaky", flaky, lines.append)
    for step in range(1, 41):
        subject.log(step, {})
    subject.close()
    assert flaky.steps == [step for step in range(1, 40) if step != 2]
    assert (subject.given_up, subject.failures) == (2, 2 * TRIES)


def test_a_tracker_that_stays_away_costs_few_tries_and_bounded_memory():
    flaky, lines = FlakyTracker(), []
    subject = RetriedTracker("flaky", flaky, lines.append)
    flaky.away = True
    for step in range(3 * KEPT):
        subject.log(step, {})
    subject.close()
    assert subject.given_up == 3 * KEPT
    assert subject.failures < KEPT / 5
    assert len(lines) == 3


def test_a_server_of_mlflow_that_is_away_is_asked_twice_and_not_for_minutes(tmp_path, monkeypatch):
    """MLflow itself asks eight times, with growing pauses, and waits two minutes for an answer."""
    mlflow = pytest.importorskip("mlflow", reason="the optional package mlflow is not installed")
    settings = mlflow.environment_variables
    patience = settings.MLFLOW_HTTP_REQUEST_MAX_RETRIES, settings.MLFLOW_HTTP_REQUEST_TIMEOUT
    for each in patience:
        monkeypatch.delenv(each.name, raising=False)
    asked: list[bytes] = []

    def answer(connection: socket.socket, request: bytes) -> None:
        asked.append(request)
        says(b"{}", status=b"503 Service Unavailable")(connection, request)

    with hostile_server(answer) as url:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        reporter = Reporter(tmp_path, TrainerConfig(logger=("mlflow",)), {}, 3, is_main=True)
        with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI"):
            reporter.start(0)
    assert [each.get() for each in patience] == [1, 10]
    assert len(asked) == 2


def test_one_error_of_mlflow_in_mid_run_ends_nothing(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the optional package mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    reporter = Reporter(tmp_path, TrainerConfig(logger=("mlflow",)), {}, 3, is_main=True)
    reporter.start(0)
    reporter.log(1, {"a": 1.0})
    store = next((tmp_path / "mlflow").glob("*/*/metrics"))
    store.chmod(0o500)
    store.rename(store.with_name("away"))
    store.write_text("not a folder")
    reporter.log(2, {"a": 2.0})
    store.unlink()
    store.with_name("away").rename(store)
    store.chmod(0o700)
    reporter.log(3, {"a": 3.0})
    reporter.close()
    texts = [event.text for event in read_events(tmp_path) if event.kind == "warning"]
    assert len(texts) == 3
    assert texts[0].startswith("mlflow: step 2 is tried again")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    identity = json.loads((tmp_path / "trackers.json").read_text())["mlflow"]
    assert [one.step for one in client.get_metric_history(identity, "a")] == [1, 2, 3]

"""The trackers that a recipe can name: TensorBoard, Weights & Biases, MLflow and SwanLab.

API keys come from the environment, never from the recipe. The packages of Weights & Biases and
SwanLab would also send the command line, the Git remote and everything printed, which may hold
secrets; that is turned off.
"""

from __future__ import annotations

import os
import re
import secrets
import string
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from mppo.recipe.errors import ConfigError
from mppo.recipe.sections.trainer import TrainerConfig
from mppo.report.console import SAMPLE_COLUMNS, SampleRow
from mppo.report.history import Metrics
from mppo.report.summary import markdown_table
from mppo.report.trackers.retries import RetriedTracker
from mppo.report.trackers.tracker import SAMPLES, TrackedRun, Tracker, import_tracker, refused

_NOT_ALLOWED = re.compile(r"[^\w.\-:/ ]")
_LONGEST = 250
"""Most characters of a name in MLflow."""
_BATCH = 1000
"""Most metrics that MLflow takes at once."""
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
"""MLflow's own 120 seconds and 7 retries would hold up a step for minutes at each call to a server
that is away; ``retries`` tries a failed call again later."""


class TensorBoard:
    """Event files under ``<run>/tensorboard``; a resumed run replaces the steps it repeats."""

    def __init__(self, run: TrackedRun) -> None:
        module = import_tracker("tensorboard")
        purge = run.done + 1 if run.done else None
        self._writer = module.SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._writer.add_text(SAMPLES, markdown_table(rows), step)

    def picture(self, step: int, path: Path) -> None:
        from matplotlib.image import imread  # takes half a second, of which other ranks need none

        pixels_HWC = (imread(path) * 255).astype("uint8")  # of a PNG, from 0 to 1
        self._writer.add_image(path.stem, pixels_HWC, step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A Weights & Biases run; ConfigError if it cannot start."""

    def __init__(self, run: TrackedRun) -> None:
        self._package = wandb = import_tracker("wandb")
        identity = run.known_id("wandb") or uuid.uuid4().hex[:8]
        try:
            self._run = wandb.init(
                project=run.project,
                name=run.name,
                dir=str(run.folder),
                config=run.recipe,
                id=identity,
                resume="allow",
                settings=wandb.Settings(console="off", disable_git=True, x_disable_meta=True),
            )
        except wandb.errors.Error as error:
            raise refused("wandb", error, "WANDB_MODE=offline") from error
        run.keep_id("wandb", identity)

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        cells = [list(row.cells()) for row in rows]
        table = self._package.Table(columns=list(SAMPLE_COLUMNS), data=cells)
        self._run.log({SAMPLES: table}, step=step)

    def picture(self, step: int, path: Path) -> None:
        self._run.log({path.stem: self._package.Image(str(path))}, step=step)

    def close(self) -> None:
        self._run.finish()


class SwanLab(WandB):
    """A SwanLab experiment, whose package has the functions of Weights & Biases; ConfigError if it
    cannot start. With ``SWANLAB_MODE=offline`` it is kept under ``<run>/swanlab``."""

    def __init__(self, run: TrackedRun) -> None:
        self._package = swanlab = import_tracker("swanlab")
        new = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(21))
        identity = run.known_id("swanlab") or new
        try:
            self._run = swanlab.init(
                project=run.project,
                name=run.name,
                config=run.recipe,
                log_dir=str(run.folder / "swanlab"),
                id=identity,
                resume="allow",
                settings=swanlab.Settings(
                    interactive=False,
                    probe={"runtime": False, "git": False},
                    terminal={"proxy_type": "none"},
                ),
            )
        except (ValueError, OSError, RuntimeError, swanlab.exceptions.AuthenticationError) as error:
            raise refused("swanlab", error, "SWANLAB_MODE=offline") from error
        run.keep_id("swanlab", identity)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._run.log({SAMPLES: self._package.Text(markdown_table(rows))}, step=step)

    def close(self) -> None:
        self._package.finish()


class MLflow:
    """A run of MLflow at ``MLFLOW_TRACKING_URI``, or in ``<run>/mlflow`` if that is not set;
    ConfigError if it cannot start.

    The recipe is the artifact ``recipe.json``; each table of samples is a file in ``samples``, each
    picture one in ``pictures``. MLflow allows no ``@`` in names: ``pass@4`` becomes ``pass_at_4``.
    Names are paths to it: a part that is empty or dots becomes ``_``.
    """

    def __init__(self, run: TrackedRun) -> None:
        mlflow = import_tracker("mlflow")
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        self._metric = mlflow.entities.Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # its databases need packages beyond mlflow-skinny, and files an explicit permission
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run.folder / "mlflow").resolve().as_uri()
        try:
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            self._id = run.known_id("mlflow") or self._new(run)
            self._client.update_run(self._id, status="RUNNING")
            self._client.log_dict(self._id, run.recipe, "recipe.json")
        except mlflow.exceptions.MlflowException as error:
            raise refused("mlflow", error, "no MLFLOW_TRACKING_URI") from error
        run.keep_id("mlflow", self._id)

    def _new(self, run: TrackedRun) -> str:
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)
        return self._client.create_run(experiment, run_name=run.name).info.run_id

    def log(self, step: int, metrics: Metrics) -> None:
        now = int(time.time() * 1000)
        found = [
            self._metric(_allowed(name), float(value), now, step) for name, value in metrics.items()
        ]
        for first in range(0, len(found), _BATCH):
            self._client.log_batch(self._id, metrics=found[first : first + _BATCH])

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        records = [dict(zip(SAMPLE_COLUMNS, row.cells(), strict=True)) for row in rows]
        self._client.log_dict(self._id, {"rows": records}, f"{SAMPLES}/{step}.json")

    def picture(self, step: int, path: Path) -> None:
        self._client.log_artifact(self._id, str(path), "pictures")

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _allowed(name: str) -> str:
    parts = _NOT_ALLOWED.sub("_", name.replace("@", "_at_"))[:_LONGEST].split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts)


_TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "swanlab": SwanLab,
}


def check_trackers(trainer: TrainerConfig) -> None:
    """Check that the packages of the trackers in ``trainer.logger`` are installed; else
    ConfigError."""
    for name in _TRACKERS:
        if name in trainer.logger:
            import_tracker(name)


def open_trackers(
    trainer: TrainerConfig, run: TrackedRun, say: Callable[[str], None]
) -> Sequence[Tracker]:
    """Open the trackers in ``trainer.logger``; ConfigError if one does not start. What fails in
    them afterwards ends no run: ``say`` prints a line about it."""
    return [
        RetriedTracker(name, _started(name, make, run), say)
        for name, make in _TRACKERS.items()
        if name in trainer.logger
    ]


def _started(name: str, make: Callable[[TrackedRun], Tracker], run: TrackedRun) -> Tracker:
    try:
        return make(run)
    except (ConfigError, OSError):
        raise
    except Exception as error:  # of any package below the tracker's own
        raise refused(name, error) from error

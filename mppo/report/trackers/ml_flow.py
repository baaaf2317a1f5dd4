"""MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from mppo.report.console import SampleRow
from mppo.report.history import Metrics
from mppo.report.trackers.tracker import (
    SAMPLES,
    TrackedRun,
    import_tracker,
    refused,
    sample_records,
)

_NOT_ALLOWED = re.compile(r"[^\w.\-:/ ]")
_LONGEST = 250
"""Most characters of a name in MLflow."""
_BATCH = 1000
"""Most metrics that MLflow takes at once."""
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
"""MLflow's own 120 seconds and 7 retries would hold up a step for minutes at each call to a server
that is away; ``retries`` tries a failed call again later."""


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
        self._client.log_dict(self._id, {"rows": sample_records(rows)}, f"{SAMPLES}/{step}.json")

    def picture(self, step: int, path: Path) -> None:
        self._client.log_artifact(self._id, str(path), "pictures")

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _allowed(name: str) -> str:
    parts = _NOT_ALLOWED.sub("_", name.replace("@", "_at_"))[:_LONGEST].split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts)

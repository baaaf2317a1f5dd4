"""Starting the trackers that a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mppo.config.errors import ConfigError
from mppo.config.sections.trainer import TrainerConfig
from mppo.report.trackers.event_files import TensorBoard
from mppo.report.trackers.ml_flow import MLflow
from mppo.report.trackers.retries import RetriedTracker
from mppo.report.trackers.swan_lab import SwanLab
from mppo.report.trackers.tracker import TrackedRun, Tracker, import_tracker, refused
from mppo.report.trackers.weights_and_biases import WandB

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

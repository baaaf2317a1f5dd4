"""Starting the trackers that a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mppo.config.sections.trainer import TrainerConfig
from mppo.report.trackers.event_files import TensorBoard
from mppo.report.trackers.ml_flow import MLflow
from mppo.report.trackers.swan_lab import SwanLab
from mppo.report.trackers.tracker import TrackedRun, Tracker, import_tracker
from mppo.report.trackers.weights_and_biases import WandB

_TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "swanlab": SwanLab,
}


def check_trackers(trainer: TrainerConfig) -> None:
    """Check that the packages of the trackers in ``trainer.logger`` are installed.

    Raises:
        ConfigError: a package is not installed.
    """
    for name in _TRACKERS:
        if name in trainer.logger:
            import_tracker(name)


def open_trackers(trainer: TrainerConfig, run: TrackedRun) -> Sequence[Tracker]:
    """Open the trackers in ``trainer.logger``.

    Raises:
        ConfigError: a tracker does not start.
    """
    return [make(run) for name, make in _TRACKERS.items() if name in trainer.logger]

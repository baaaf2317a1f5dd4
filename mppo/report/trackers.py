"""TensorBoard and Weights & Biases, when installed and asked for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.sections.trainer import TrainerConfig
from mppo.report.history import Metrics

_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
"""By package, the module that is used."""


class Tracker(Protocol):
    """Somewhere else to send the numbers."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files under ``<run>/tensorboard``."""

    def __init__(self, run_dir: Path) -> None:
        module = _import(_MODULES["tensorboard"], "tensorboard")
        self._writer = module.SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A Weights & Biases run; the key comes from the environment, never from the recipe."""

    def __init__(self, run_dir: Path, trainer: TrainerConfig, recipe: dict[str, Any]) -> None:
        wandb = _import(_MODULES["wandb"], "wandb")
        try:
            self._run = wandb.init(
                project=trainer.project_name,
                name=trainer.experiment_name,
                dir=str(run_dir),
                config=recipe,
            )
        except wandb.errors.Error as error:
            why = " ".join(str(error).split())
            fix = "mend that, set WANDB_MODE=offline, or take wandb out of trainer.logger"
            raise ConfigError([ConfigIssue("trainer.logger", "wandb", why, fix)]) from error

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def check_trackers(trainer: TrainerConfig) -> None:
    """The packages of the trackers that ``trainer.logger`` names are there.

    Raises:
        ConfigError: one is not installed.
    """
    for package, module in _MODULES.items():
        if package in trainer.logger:
            _import(module, package)


def open_trackers(
    run_dir: Path, trainer: TrainerConfig, recipe: dict[str, Any]
) -> Sequence[Tracker]:
    """The trackers that ``trainer.logger`` names.

    Args:
        run_dir: the run's folder.
        trainer: the recipe's section.
        recipe: the resolved recipe, secrets already removed.
    """
    trackers: list[Tracker] = []
    if "tensorboard" in trainer.logger:
        trackers.append(TensorBoard(run_dir))
    if "wandb" in trainer.logger:
        trackers.append(WandB(run_dir, trainer, recipe))
    return trackers


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        why = f"the package {package} is not installed"
        fix = f'pip install "mppo[{package}]", or take it out of trainer.logger'
        raise ConfigError([ConfigIssue("trainer.logger", package, why, fix)]) from error

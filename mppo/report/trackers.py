"""TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mppo.config.errors import ConfigError, ConfigIssue
from mppo.config.sections.trainer import TrainerConfig
from mppo.report.history import Metrics

_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
"""The module to import, by package."""


class Tracker(Protocol):
    """A destination for metrics besides the run folder."""

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
    """A Weights & Biases run; its API key comes from the environment, never from the recipe."""

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
            fix = "correct that, set WANDB_MODE=offline, or remove wandb from trainer.logger"
            raise ConfigError([ConfigIssue("trainer.logger", "wandb", why, fix)]) from error

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def check_trackers(trainer: TrainerConfig) -> None:
    """Check that the packages of the trackers in ``trainer.logger`` are installed.

    Raises:
        ConfigError: a package is not installed.
    """
    for package, module in _MODULES.items():
        if package in trainer.logger:
            _import(module, package)


def open_trackers(
    run_dir: Path, trainer: TrainerConfig, recipe: dict[str, Any]
) -> Sequence[Tracker]:
    """Open the trackers in ``trainer.logger``.

    Args:
        run_dir: the run folder.
        trainer: the recipe's ``trainer`` section.
        recipe: the resolved recipe without secrets.
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
        fix = f'pip install "mppo[{package}]", or remove it from trainer.logger'
        raise ConfigError([ConfigIssue("trainer.logger", package, why, fix)]) from error

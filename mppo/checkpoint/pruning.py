"""Deletion of checkpoints that are neither among the newest intact ones nor the best."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from mppo.checkpoint import folder as folders
from mppo.config.sections.trainer import TrainerConfig


class Pruner:
    """Deletes superfluous checkpoints of a run.

    It verifies each checkpoint of an earlier job once. A damaged checkpoint is neither counted nor
    deleted.

    Args:
        trainer: ``max_ckpt_to_keep`` and ``best_metric`` are read.
        root: folder of the checkpoints.
        say: prints a line for the user.

    Attributes:
        verified: steps of checkpoints that this process has written or verified.
    """

    def __init__(self, trainer: TrainerConfig, root: Path, say: Callable[[str], None]) -> None:
        self.verified: set[int] = set()
        self._trainer, self._root, self._say = trainer, root, say
        self._damaged: set[int] = set()

    def published(self, step: int) -> None:
        """Record that a step's checkpoint is complete, and delete those it makes superfluous."""
        self.verified.add(step)
        keep = self._trainer.max_ckpt_to_keep
        metrics: dict[int, Mapping[str, float]] = {}
        for path in folders.list_checkpoints(self._root) if keep else []:
            number = folders.step_of(path)
            assert number is not None, "list_checkpoints returns only folders of a step"
            known = number in self.verified
            read = folders.read_manifest if known else folders.read_verified
            try:
                metrics[number] = read(path).metrics
                self.verified.add(number)
            except ValueError as error:
                if number not in self._damaged:
                    self._say(f"damaged checkpoint, neither counted nor deleted: {error}")
                self._damaged.add(number)
        for number in folders.expendable(metrics, keep, self._trainer.best_metric):
            # renamed first: a kill during the deletion leaves no damaged folder with a final name
            partial = folders.partial_checkpoint(self._root, number)
            shutil.rmtree(partial, ignore_errors=True)
            folders.final_path(self._root, number).rename(partial)
            shutil.rmtree(partial)

"""Deletes the checkpoints that are neither among the newest sound ones nor the best."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from mppo.checkpoint import folder as folders
from mppo.config.sections.trainer import TrainerConfig


class Pruner:
    """Knows which checkpoints of a run are sound; each is read at most once to find out.

    A damaged one counts for nothing and is left alone.

    Args:
        trainer: ``max_ckpt_to_keep`` and ``best_metric`` are read.
        root: folder of the checkpoints.
        say: shows a line.

    Attributes:
        sound: steps of checkpoints that this process wrote, or has read and compared.
    """

    def __init__(self, trainer: TrainerConfig, root: Path, say: Callable[[str], None]) -> None:
        self.sound: set[int] = set()
        self._trainer, self._root, self._say = trainer, root, say
        self._damaged: set[int] = set()

    def published(self, step: int) -> None:
        """A checkpoint has been written: delete those it makes superfluous."""
        self.sound.add(step)
        keep, metrics = self._trainer.max_ckpt_to_keep, {}
        for path in folders.list_checkpoints(self._root) if keep else []:
            number = folders.step_of(path)
            read = folders.read_manifest if number in self.sound else folders.read_sound
            try:
                metrics[number] = read(path).metrics
                self.sound.add(number)
            except ValueError as error:
                if number not in self._damaged:
                    self._say(f"left alone: {error}")
                self._damaged.add(number)
        for number in folders.expendable(metrics, keep, self._trainer.best_metric):
            doomed = folders.partial_checkpoint(self._root, number)
            shutil.rmtree(doomed, ignore_errors=True)
            folders.final_path(self._root, number).rename(doomed)
            shutil.rmtree(doomed)

"""The best checkpoint, and deletion of those that are neither among the newest nor the best."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from mppo.checkpoint import folder as folders
from mppo.recipe.errors import nearest
from mppo.recipe.sections.trainer import TrainerConfig

BEST = "best"
"""Name of the link to the best checkpoint."""


class Pruner:
    """Deletes superfluous checkpoints of a run, and links the best one. The metrics of a checkpoint
    are in its manifest, so the choice survives a restart. The pruner verifies each checkpoint of an
    earlier job once. A damaged checkpoint is neither counted nor deleted."""

    def __init__(self, trainer: TrainerConfig, root: Path, say: Callable[[str], None]) -> None:
        self.verified: set[int] = set()
        self._trainer, self._root, self._say = trainer, root, say
        self._damaged: set[int] = set()
        self._shown: str | None = None

    def published(self, step: int) -> None:
        """Record that a step's checkpoint is complete; link the best one, delete superfluous ones.
        Without ``max_ckpt_to_keep`` nothing is deleted."""
        self.verified.add(step)
        keep, metric = self._trainer.max_ckpt_to_keep, self._trainer.best_metric
        metrics = self._metrics() if keep or metric else {}
        if metric:
            self._link_best(metrics, metric)
        for number in folders.expendable(metrics, keep, metric):
            # renamed first: a kill during the deletion leaves no damaged folder with a final name
            partial = folders.partial_checkpoint(self._root, number)
            shutil.rmtree(partial, ignore_errors=True)
            folders.final_path(self._root, number).rename(partial)
            shutil.rmtree(partial)

    def _metrics(self) -> dict[int, Mapping[str, float]]:
        metrics: dict[int, Mapping[str, float]] = {}
        for path in folders.list_checkpoints(self._root):
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
        return metrics

    def _link_best(self, metrics: Mapping[int, Mapping[str, float]], metric: str) -> None:
        """Let the link ``best`` name the best checkpoint; report a change, or a missing metric."""
        best, name = folders.best_step(metrics, metric), metric.removeprefix("-")
        if best is None:
            known = {known for found in metrics.values() for known in found}
            guess = nearest(name, sorted(known))
            text = f"trainer.best_metric = {metric}: no checkpoint has this metric"
            self._say_once(f"{text}; did you mean {guess}?" if guess else text)
            return
        target = folders.final_path(self._root, best)
        says = f"best checkpoint: {target} ({name} = {metrics[best][name]:.6g})"
        problem = _link(self._root / BEST, target)
        self._say_once(f"{says}; {problem}" if problem else says)

    def _say_once(self, text: str) -> None:
        if text != self._shown:
            self._say(text)
        self._shown = text


def _link(link: Path, target: Path) -> str | None:
    """Let a link name a folder beside it; returns why that is not possible, or None. A link is a
    convenience: a save must not fail without it."""
    if link.exists() and not link.is_symlink():
        return f"{link} exists and is not a link"
    building = link.with_name(f".{link.name}.partial")
    try:
        building.unlink(missing_ok=True)
        building.symlink_to(target.name)
        os.replace(building, link)
    except OSError as error:
        return f"no link {link} could be made ({error.strerror})"
    return None

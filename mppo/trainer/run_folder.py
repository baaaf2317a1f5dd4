"""The run folder: inspecting what earlier starts left in it, and preparing it for this start.

Everything is read before anything is written. Files that mppo did not write, that belong to another
run, or that belong to later steps than the checkpoint to resume from, are moved and never deleted:

- a finished run: nothing is left to do;
- a run with checkpoints: it is resumed, and newer results than its checkpoint are set aside;
- results without a checkpoint, of the same recipe: they are set aside, and a new run starts;
- results of another recipe: refused, or set aside (``trainer.on_existing_run``).

Results are set aside in ``<run>/earlier-1``, ``earlier-2`` and so on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from mppo.checkpoint import folder as folders
from mppo.checkpoint.resume import (
    Found,
    changed_keys,
    check_models,
    choose,
    first_problem,
    resume_mode,
)
from mppo.dumps.stale import step_folders
from mppo.dumps.step_dump import FOLDER as ROLLOUTS
from mppo.hub.builtin import resolve_model
from mppo.recipe.errors import ConfigError, ConfigIssue
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.trainer import TrainerConfig
from mppo.report.files import (
    CALIBRATION,
    CODE,
    EVENTS,
    EXPERT_LOAD,
    METRICS,
    NONFINITE,
    PAGE,
    PLOT,
    RECIPE,
    REPORT,
    SAMPLES,
    STATUS,
    TIMELINES,
    TRACKER_IDS,
)
from mppo.report.history import check_history
from mppo.report.run_record import finished_steps, read_status
from mppo.safety.disk import MARKER, Damaged, Files, free_name, read_marker, set_aside
from mppo.safety.redact import redact
from mppo.supervision.first_rank import on_first_rank

ACTOR, AVERAGE, CRITIC, WARM_START, HF, CHECKPOINTS = (
    "actor", "actor_ema", "critic", "warm_start", "hf", "checkpoints",
)  # fmt: skip
PROFILE = "profile"
_PAGES = (REPORT, PAGE, PLOT, EXPERT_LOAD, CALIBRATION)
_NUMBERS = (METRICS, SAMPLES)
_OF_A_RUN = (
    CHECKPOINTS, ACTOR, AVERAGE, CRITIC, WARM_START, HF, NONFINITE, "stacks", "tensorboard",
    "wandb", "mlflow", "swanlab", TRACKER_IDS, ROLLOUTS, PROFILE, TIMELINES, CODE, EVENTS, *_PAGES,
    STATUS, RECIPE, *_NUMBERS,
)  # fmt: skip
"""Everything a run writes, in the order of moving: a folder with numbers counts as holding results,
so they go last."""
_TRAINING = frozenset(
    {
        "total_epochs", "total_training_steps", "warm_start_steps", "warm_start_batch_size",
        "warm_start_lr", "critic_warmup", "replay", "seed", "plugins", "stage",
        "value_gate",
    }
)  # fmt: skip
"""Keys of ``trainer`` that change the training itself; the others set where and how often a run
saves, reports or validates."""
_SHOWN, _NAMED = 3, 30
"""Changed keys and moved files that a message names."""
_KEY = "trainer.default_local_dir"


@dataclass(frozen=True)
class Earlier:
    """Results of earlier starts in a run folder: steps of the checkpoints, newest first; steps of
    the finished run, or 0; content of recipe.yaml, or None if it is missing or unreadable."""

    steps: tuple[int, ...] = ()
    finished: int = 0
    exported: bool = False
    results: bool = False
    recipe: dict[str, Any] | None = None


StartKind = Literal["finished", "resume", "new", "replace"]


def read_earlier(folder: Path) -> Earlier:
    """Read the results of earlier starts in a run folder: small files and file names only.
    ConfigError: a path where a run writes a file is not a file."""
    for path in (folder / name for name in (*_NUMBERS, *_PAGES, STATUS, RECIPE)):
        if path.exists() and not path.is_file():
            issue = ConfigIssue(_KEY, str(folder), f"{path} is not a file", "remove or rename it")
            raise ConfigError([issue], "run folder")
    checkpoints = folders.list_checkpoints(folder / CHECKPOINTS)
    numbers = [folder / name for name in _NUMBERS]
    return Earlier(
        steps=tuple(step for p in checkpoints if (step := folders.step_of(p)) is not None),
        finished=finished_steps(folder),
        exported=any((folder / name).is_dir() for name in (ACTOR, CRITIC)),
        results=any(path.is_file() and path.stat().st_size for path in numbers),
        recipe=_read_recipe(folder / RECIPE),
    )


def _read_recipe(path: Path) -> dict[str, Any] | None:
    try:
        recipe = yaml.safe_load(path.read_bytes())
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return None
    return recipe if isinstance(recipe, dict) else None


def decide(
    earlier: Earlier, trainer: TrainerConfig, start: str, total_steps: int, changed: Sequence[str]
) -> StartKind:
    """Decide how this start uses the run folder. ``start`` is ``trainer.resume_mode``: "auto" or
    "disable"; for ``resume_path`` "own" if it names a checkpoint of this folder, else "other".
    ``changed`` are keys in which the recipe differs from the earlier one. ConfigError: another
    recipe's results, and ``on_existing_run`` is refuse."""
    complete = earlier.exported or not (trainer.export_hf and earlier.steps)
    same = bool(earlier.steps) or not changed
    if start == "auto" and total_steps <= earlier.finished and complete and same:
        return "finished"
    if start == "own" or (start == "auto" and earlier.steps):
        return "resume"
    if not (earlier.results or earlier.steps):
        return "new"
    if changed and start != "disable" and trainer.on_existing_run == "refuse":
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        why = (
            f"the run folder holds results of another recipe ({'; '.join(changed[:_SHOWN])}{more}) "
            "and no checkpoint (trainer.save_freq) to go on from"
        )
        fix = (
            "choose another folder (trainer.experiment_name or trainer.default_local_dir), or set "
            "this key to set_aside, which moves the earlier results to a subfolder earlier-N"
        )
        raise ConfigError(
            [ConfigIssue("trainer.on_existing_run", "refuse", why, fix)], "run folder"
        )
    return "replace"


class RunFolder:
    """The run folder at this start, with the checkpoint that was ``found`` to resume from;
    ``finished``: nothing is left to do. Construct collectively (ConfigError: the run cannot start
    in this folder); ``begin`` makes the first change."""

    def __init__(
        self,
        path: Path,
        recipe: Recipe,
        total_steps: int,
        models: Mapping[str, Mapping[str, Any]],
        say: Callable[[str], None],
    ) -> None:
        self.path, self._say = path, say
        self.found: Found | None = None
        self._earlier_set_aside = False
        trainer, root = recipe.trainer, path / CHECKPOINTS
        if issues := {issue.key: issue for issue in _own_outputs(recipe, path)}:
            raise ConfigError(list(issues.values()), "run folder")
        self._earlier = on_first_rank(lambda: read_earlier(path))
        changed = _changes(self._earlier, redact(recipe.model_dump(mode="json")))
        start = resume_mode(trainer, root)
        if start == "resume_path":
            start = "own" if _is_below(Path(trainer.resume_from_path or ""), root) else "other"
        if start != "auto":  # report a wrong resume path before results of another recipe
            self.found = choose(trainer, root, models, say)
        self._kind = decide(self._earlier, trainer, start, total_steps, changed)
        self.finished = self._kind == "finished"
        if self.finished:
            self._say_finished(models, changed)
            return
        if start == "auto":
            self.found = choose(trainer, root, models, say)
        if self._kind == "resume" and "jsonl" in trainer.logger:
            on_first_rank(lambda: check_history(path / METRICS))

    def warm_start(self) -> Path | None:
        """The warm start of the checkpoint's run, or None. ConfigError: its files are damaged."""
        if self.found is None:
            return None
        folder = self.found.folder.parents[1] / WARM_START
        if not on_first_rank(folder.is_dir):
            return None
        fix = f"restore {folder} from a copy, or start a new run with trainer.resume_mode=disable"
        check_written("trainer.warm_start_steps", folder, fix)
        return folder

    def begin(self) -> None:
        """Set earlier results aside; this run writes from here on. ConfigError: a file cannot be
        moved. Collective; idempotent."""
        if not self._earlier_set_aside:
            self._earlier_set_aside = True
            on_first_rank(self._set_earlier_aside)

    def _set_earlier_aside(self) -> None:
        try:
            aside = free_name(self.path / "earlier", "")
            moved, copied = self._conflicting()
            for name in moved:
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                (self.path / name).rename(aside / name)
            for name in copied:
                shutil.copy2(self.path / name, aside / name)
            if moved:
                more = f" and {len(moved) - _NAMED} more" if len(moved) > _NAMED else ""
                self._say(f"set aside in {aside}: {', '.join(moved[:_NAMED])}{more}")
            if self._kind == "new" and read_status(self.path) is None:  # files of others
                for name in (*_PAGES, STATUS, RECIPE):
                    if (self.path / name).exists():
                        self._say(f"kept {set_aside(self.path / name)}")
            for partial in (self.path / CHECKPOINTS).glob(".global_step_*.partial"):
                shutil.rmtree(partial, ignore_errors=True)  # remains of interrupted saves
        except OSError as error:
            why = f"results of an earlier run cannot be moved aside ({error.strerror})"
            fix = "make the disk writable, or use another folder"
            raise ConfigError(
                [ConfigIssue(_KEY, str(self.path), why, fix)], "run folder"
            ) from error

    def _conflicting(self) -> tuple[list[str], list[str]]:
        """Names to move, and names to copy because this run continues the files."""
        if self._kind == "replace":
            return [name for name in _OF_A_RUN if (self.path / name).exists()], []
        if self._kind != "resume" or self.found is None:
            return [], []
        step, moved = self.found.manifest.step, []
        for parent in (CHECKPOINTS, HF):
            for path in folders.list_checkpoints(self.path / parent):
                if (folders.step_of(path) or 0) > step:
                    moved.append(f"{parent}/{path.name}")
        if moved or self._earlier.finished > step:
            moved += [name for name in (ACTOR, AVERAGE, CRITIC) if (self.path / name).exists()]
            dumps = step_folders(self.path / ROLLOUTS).items()
            moved += [f"{ROLLOUTS}/{path.name}" for number, path in sorted(dumps) if number > step]
        pages = (*_NUMBERS, *_PAGES, RECIPE)
        return moved, [name for name in pages if moved and (self.path / name).exists()]

    def _say_finished(self, models: Mapping[str, Mapping[str, Any]], changed: list[str]) -> None:
        """Report that the run has finished; ConfigError if it was of another model."""
        for path in folders.list_checkpoints(self.path / CHECKPOINTS)[:1]:
            try:
                manifest = folders.read_manifest(path)
            except Damaged:
                break
            check_models(_KEY, str(self.path), path, manifest, models)
        steps = self._earlier.finished
        self._say(f"nothing is left to do: the run in {self.path} has finished its {steps} steps")
        for line in changed:
            self._say(f"changed since that run, without effect: {line}")
        if self._earlier.steps:
            self._say("to train longer, raise trainer.total_training_steps")
        self._say(
            "to start a new run, set trainer.resume_mode=disable, which moves the earlier results "
            "to a subfolder earlier-N, or choose another run folder"
        )


def check_model_folders(recipe: Recipe) -> None:
    """Check the weights of the models that mppo exported against their markers; ConfigError names a
    file that differs. Collective."""
    for role in recipe.roles():
        folder = resolve_model(role.path, seed=recipe.trainer.seed)
        fix = (
            "restore it from a copy, or export the model again; if you changed it on purpose, "
            f"delete {folder / MARKER}"
        )
        check_written(role.path_key, folder, fix, (".safetensors",))


def check_written(key: str, folder: Path, fix: str, endings: tuple[str, ...] = ("",)) -> None:
    """Check the files of an exported folder, which ``key`` names, against its marker, if it has
    one; ConfigError names the first that differs, and ``fix``. Collective."""

    def refusal(problem: str) -> ConfigError:
        return ConfigError([ConfigIssue(key, str(folder), problem, fix)], "model")

    def listed() -> Files:
        try:
            files = read_marker(folder) or {}
        except Damaged as error:
            raise refusal(str(error)) from error
        return {name: entry for name, entry in files.items() if name.endswith(endings)}

    problem = first_problem(folder, on_first_rank(listed))
    if problem is not None:
        raise refusal(problem)


def _own_outputs(recipe: Recipe, path: Path) -> Iterator[ConfigIssue]:
    trainer = recipe.trainer
    outputs = {
        recipe.exported_role: trainer.export_hf,
        AVERAGE: trainer.export_hf and recipe.actor.ema_decay is not None,
        WARM_START: trainer.warm_start_steps > 0,
        HF: trainer.checkpoint_hf,
        CHECKPOINTS: True,
    }
    for role in recipe.roles():
        for name in (name for name, written in outputs.items() if written):
            if _is_below(Path(role.path) / "x", path / name):
                why = (
                    f"this run writes to {path / name} and would overwrite the model it starts from"
                )
                fix = f"move the model elsewhere, or give the run another folder ({_KEY})"
                yield ConfigIssue(role.path_key, role.path, why, fix)


def _is_below(path: Path, folder: Path) -> bool:
    return folder.resolve() in path.resolve().parents


def _changes(earlier: Earlier, now: dict[str, Any]) -> list[str]:
    if earlier.recipe is None:
        return [f"{RECIPE} is missing or cannot be read"]
    changed = []
    for line in changed_keys(earlier.recipe, now):
        key = line.partition(":")[0]
        section, _, name = key.partition(".")
        if key != "rollout.urls" and (section != "trainer" or name in _TRAINING):
            changed.append(line)
    return changed

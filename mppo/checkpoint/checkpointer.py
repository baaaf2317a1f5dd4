"""Saving a run and resuming it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

import mppo
from mppo.batch.episode import EpisodesBySample, held
from mppo.checkpoint import folder as folders
from mppo.checkpoint import responses
from mppo.checkpoint.folder import Manifest
from mppo.checkpoint.pruning import Pruner
from mppo.checkpoint.randomness import file_name, load_random_state, random_state
from mppo.checkpoint.resume import Found, changed_keys, not_usable
from mppo.checkpoint.role_state import (
    STATE,
    describe_role,
    load_roles,
    role_bytes,
    role_counters,
    sharded_state,
)
from mppo.checkpoint.timing import SaveTiming
from mppo.checkpoint.writer import NOTES, HostBuffers, SaveError, SaveJob, SaveThread, plan_shards
from mppo.models.role import Role
from mppo.parallel.collectives import all_gather_objects, broadcast_object, largest_of_ranks
from mppo.recipe.errors import ConfigError
from mppo.recipe.sections.trainer import TrainerConfig
from mppo.safety.input_files import read_json
from mppo.supervision import stop_request
from mppo.supervision.phase import last_step, step_done
from mppo.supervision.stop_request import StepInterrupted, StopRequest


class Stateful(Protocol):
    """A part of the run whose state is JSON-serialisable."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class StepStart:
    """State (JSON) at the start of a step, of what the step changes before its first update."""

    parts: str
    random: bytes
    partial: EpisodesBySample


class Checkpointer:
    """Decides when to save, saves, and resumes. All methods are collective.

    Args:
        root: folder of the checkpoints, the same on every rank.
        roles: trained roles by name; the first is the one that is exported with a checkpoint.
        parts: the other parts of the run that have a state, by name.
        recipe: the resolved recipe as plain values, without secrets.
        exporting: context in which the weights are on the device, for an export.
        flush: flushes what the run has logged to disk, before a checkpoint can be complete.

    Attributes:
        partial: responses that no step has trained on yet: they were aborted when a batch was full,
            other samples of their prompt are missing, or they were generated ahead.
        stopped_early: whether a stop request ended the run before its last step.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        root: Path,
        roles: Mapping[str, Role],
        parts: Mapping[str, Stateful],
        recipe: dict[str, Any],
        stop: StopRequest,
        say: Callable[[str], None],
        exporting: Callable[[], AbstractContextManager[None]] = nullcontext,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        self._exporting, self._flush = exporting, flush
        self.trainer, self.root, self.roles, self.parts = trainer, root, roles, parts
        self.partial: EpisodesBySample = {}
        self.stopped_early, self.failed_saves = False, 0
        self._last_error: str | None = None
        self._recipe, self._stop, self._say = recipe, stop, say
        self._step_start: StepStart | None = None
        self._metrics: Mapping[str, float] = {}
        self._pruner = Pruner(trainer, root, say)
        self._thread = SaveThread()
        self._buffers = HostBuffers() if trainer.async_save else None
        self._timing = SaveTiming(trainer, checkpoint_bytes=sum(map(role_bytes, roles.values())))
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        if self._rank == 0:
            stop_request.on_request(self._report_stopping)

    def resume(self, found: Found | None) -> int:
        """Load a checkpoint (None: a fresh start), and return the last completed step.

        Raises:
            ConfigError: the checkpoint cannot be loaded, or its position in the data denotes other
                prompts now.
        """
        if found is None:
            return 0
        try:
            self._load(found)
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise not_usable(self.trainer, found.folder, error) from error
        if found.folder.parent.resolve() == self.root.resolve():
            self._pruner.verified.add(found.manifest.step)
        step_done(found.manifest.step)
        self._timing.step_done()
        return found.manifest.step

    def before_step(self) -> None:
        """Keep the state at the start of a step, in case the step is abandoned."""
        stop_request.expect(self._timing.longest_step_s + 1.5 * self._timing.expected_save_s)
        if self.trainer.save_on_signal:
            parts = {name: part.state_dict() for name, part in self.parts.items()}
            self._step_start = StepStart(json.dumps(parts), self._random_state(), self.partial)

    def before_update(self) -> None:
        """Wait until a save in progress no longer reads the models, which the update changes."""
        self._thread.wait_copied()

    def abandon_step(self, step: int, reason: StepInterrupted) -> None:
        """End the run within a step, with a checkpoint of the previous step."""
        name = self._stop.signal_name or "a signal on another rank"
        self._collect(self._thread.wait())
        if reason.half_done:
            self._say(f"abandoned step {step} during its updates ({name}): no new checkpoint")
        else:
            self._say(f"abandoned step {step} ({name})")
            self._save_if_missing(step - 1, self._metrics, self._step_start)
        self.finish()
        self.stopped_early = True

    def rescue(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Save the last completed step before the run fails in ``step``, before its first update,
        and wait. ``metrics`` are of the step, if it is complete and its validation failed."""
        self._collect(self._thread.wait())
        if metrics is None:
            self._save_if_missing(step - 1, self._metrics, self._step_start)
        else:
            self._save_if_missing(step, metrics, None)
        self._collect(self._thread.wait())

    def _save_if_missing(
        self, done: int, metrics: Mapping[str, float], before: StepStart | None
    ) -> None:
        """Save step ``done``, unless it has a checkpoint or ``save_on_signal`` is off."""
        saved = broadcast_object(done > 0 and folders.final_path(self.root, done).exists())
        if done and self.trainer.save_on_signal and not saved:
            self.save(done, metrics, before)

    def after_step(self, step: int, last: bool, metrics: Mapping[str, float]) -> bool:
        """Save if a save is due or the run is to stop; return whether it must stop now. ``metrics``
        of the step choose the best checkpoint."""
        step_done(step)
        self._metrics = metrics
        self._timing.step_done()
        self._collect(self._thread.finished())
        by_clock, stop = self._sync_decisions()
        due = by_clock or self._timing.is_due_by_step(step, last)
        if due or (stop and self.trainer.save_on_signal):
            self.save(step, metrics)
            if self.trainer.checkpoint_hf:
                folder = self.root.parent / "hf" / f"global_step_{step}"
                with self._exporting():
                    exported = next(iter(self.roles.values()))
                    kept = exported.weights.save(folder)
                if kept is not None:
                    self._say(f"kept {kept}")
        if last or stop:
            self.finish()
        self.stopped_early = stop and not last
        return stop

    def save(
        self, step: int, metrics: Mapping[str, float], before: StepStart | None = None
    ) -> None:
        """Start a save; with ``trainer.async_save: false`` also wait for it. ``before`` is the
        state after that step, if it has changed since."""
        self._collect(self._thread.wait())
        building = folders.partial_checkpoint(self.root, step)
        self._last_error = self._prepare(building)
        if self._last_error is not None:
            self._failed(folders.final_path(self.root, step), self._last_error)
            return
        job = self._job(step, building, metrics, before)
        self._timing.saved()
        self._thread.start(job)
        if not self.trainer.async_save:
            self._collect(self._thread.wait())

    def save_roles(self, final: Path) -> None:
        """Write the roles' current state to a folder outside the run's checkpoints, and wait."""
        self._collect(self._thread.wait())
        building = final.with_name(f".{final.name}.partial")
        error = self._prepare(building)
        if error is None:
            job = replace(self._job(0, building, {}), final=final, published=lambda: None)
            job.run()
            error = None if job.error is None else str(job.error)
        if error is not None:
            self._failed(final, error)
        dist.barrier()

    def finish(self) -> None:
        """Wait for the save in progress; SaveError on every rank, if the last one failed on any."""
        self._collect(self._thread.wait())
        errors = all_gather_objects(self._last_error)
        if any(errors):
            first = next(error for error in errors if error)
            raise SaveError(
                f"the last checkpoint could not be written in {self.root}: {first}. Started again "
                "with room on this disk, or on another one (trainer.default_local_dir), the run "
                "continues from its newest complete checkpoint"
            )
        stop_request.over()

    def _report_stopping(self) -> None:
        self._say(self._timing.describe_stopping(last_step(), stop_request.patience_s()))

    def _sync_decisions(self) -> tuple[bool, bool]:
        """Whether a save is due by the clock, and whether to stop, the same on every rank."""
        signalled = self._stop.signal_name is not None
        clock = self._rank == 0 and self._timing.is_due_by_clock()
        limit = self._rank == 0 and self._timing.must_stop()
        flags = largest_of_ranks([clock, signalled, limit])
        clock, signalled, limit = (bool(flag) for flag in flags)
        if signalled:
            name = self._stop.signal_name or "a signal on another rank"
            self._say(f"stopping after this step: {name}")
        elif limit:
            self._say("stopping: trainer.checkpoint_must_save_by leaves no time for another step")
        return clock, signalled or limit

    def _prepare(self, building: Path) -> str | None:
        """Flush the logs and create the folders; return the error, or None, equal on every rank."""
        error = None
        if self._rank == 0:
            try:
                self._flush()
                shutil.rmtree(building, ignore_errors=True)
                for name in (NOTES, "random", *self.roles):
                    (building / name).mkdir(parents=True)
            except OSError as failure:
                error = f"{failure.strerror} ({failure.filename})"
        return broadcast_object(error)

    def _random_state(self) -> bytes:
        return random_state({name: role.groups for name, role in self.roles.items()})

    def _job(
        self,
        step: int,
        building: Path,
        metrics: Mapping[str, float],
        before: StepStart | None = None,
    ) -> SaveJob:
        shards, counters = {}, {}
        for name, role in self.roles.items():
            counters[name] = role_counters(role)
            with role.groups.active():
                state, folder = sharded_state(role), building / name
                shards[name] = plan_shards(state, folder, self._buffers)
        random = before.random if before else self._random_state()
        contents = {file_name(self._rank): random}
        if self._rank == 0:
            parts = {name: part.state_dict() for name, part in self.parts.items()}
            state = {
                "step": step,
                "parts": json.loads(before.parts) if before else parts,
                "roles": counters,
                "recipe": self._recipe,
            }
            contents[STATE] = f"{json.dumps(state, indent=1)}\n".encode()
        left = before.partial if before else self.partial
        if mine := held(left):
            contents[responses.file_of_rank(self._rank)] = responses.to_bytes(mine)
        manifest = Manifest(
            step=step,
            world_size=self._world,
            roles={
                name: {"layout": asdict(role.layout), "model": describe_role(role)}
                for name, role in self.roles.items()
            },
            metrics={name: float(value) for name, value in metrics.items()},
            files={},
            version=mppo.__version__,
        )
        return SaveJob(
            building=building,
            final=folders.final_path(self.root, step),
            rank=self._rank,
            world_size=self._world,
            shards=shards,
            contents=contents,
            manifest=manifest,
            published=partial(self._pruner.published, step),
            patience_s=self.trainer.collective_timeout_s,
        )

    def _collect(self, job: SaveJob | None) -> None:
        if job is None:
            return
        self._last_error = None if job.error is None else str(job.error)
        if self._last_error is not None:
            self._failed(job.final, self._last_error)
            return
        self._timing.longest_save_s = max(self._timing.longest_save_s, job.seconds)
        if self._rank == 0:
            self._say(f"saved {job.final} ({job.seconds:.1f} s)")

    def _failed(self, path: Path, why: str) -> None:
        """Report a failed save. Training continues: the next save may succeed."""
        self.failed_saves += 1
        self._say(f"the checkpoint {path} could not be written: {why}")

    def _load(self, found: Found) -> None:
        state = read_json(found.folder / STATE, nan=True)
        load_roles(found.folder, self.roles)
        for name, part in self.parts.items():
            part.load_state_dict(state["parts"][name])
        self.partial = responses.load_responses(found.folder, self._rank, self._world)
        layouts = {name: role.groups for name, role in self.roles.items()}
        same = found.manifest.world_size == self._world and all(
            found.manifest.roles[name]["layout"] == asdict(role.layout)
            for name, role in self.roles.items()
        )
        if same:
            load_random_state(found.folder, self._rank, layouts)
        self._say(f"resumed from {found.folder} after step {found.manifest.step}")
        if not same:
            self._say("the layout changed: random states are initialised from trainer.seed")
        for line in changed_keys(state["recipe"], self._recipe):
            self._say(f"changed since the checkpoint: {line}")

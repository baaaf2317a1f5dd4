"""Saves a run and takes it up again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

import mppo
from mppo.batch import PartialResponses, ResponsesBySample
from mppo.checkpoint import folder as folders
from mppo.checkpoint import responses
from mppo.checkpoint.folder import Manifest
from mppo.checkpoint.pruning import Pruner
from mppo.checkpoint.randomness import file_name, load_random_state, random_state
from mppo.checkpoint.resume import Found, changed_keys, not_usable
from mppo.checkpoint.role_state import (
    describe_role,
    load_role,
    role_bytes,
    role_counters,
    sharded_state,
)
from mppo.checkpoint.staging import HostBuffers
from mppo.checkpoint.timing import SaveTiming
from mppo.checkpoint.writer import NOTES, SaveError, SaveJob, SaveThread, plan_shards
from mppo.config.schema import TrainerConfig
from mppo.models.role import Role
from mppo.parallel import device
from mppo.parallel.collectives import all_gather_objects, broadcast_object
from mppo.safety.disk import FileEntry
from mppo.safety.input_files import read_json
from mppo.supervision import stop_request
from mppo.supervision.phase import last_step, step_done
from mppo.supervision.signals import StopRequest
from mppo.supervision.stop_request import StepInterrupted

STATE = "run.json"


class Stateful(Protocol):
    """A part of the run whose state is JSON-able."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class _Before:
    """What a step changes before its first update: the parts' states as JSON, random states, and
    partial responses."""

    parts: str
    random: bytes
    partial: ResponsesBySample


class Checkpointer:
    """Decides when to save, saves, and finds what to resume from. All methods are collective.

    Args:
        trainer: the recipe's section.
        root: folder of the checkpoints, the same on every rank.
        roles: trained roles by name.
        parts: everything else with a state, by name.
        partial_responses: of the run.
        recipe: the resolved recipe as plain values, without secrets.
        stop: stop requests of this process.
        say: shows a line to the user (on the first rank).
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        root: Path,
        roles: Mapping[str, Role],
        parts: Mapping[str, Stateful],
        partial_responses: PartialResponses,
        recipe: dict[str, Any],
        stop: StopRequest,
        say: Callable[[str], None],
    ) -> None:
        self.trainer = trainer
        self.root = root
        self.roles = roles
        self.parts = parts
        self.partial_responses = partial_responses
        self.stopped_early = False
        self.failed_saves = 0
        self._last_error: str | None = None
        self._recipe = recipe
        self._stop = stop
        self._say = say
        self._before: _Before | None = None
        self._metrics: Mapping[str, float] = {}
        self._pruner = Pruner(trainer, root, say)
        self._thread = SaveThread()
        self._buffers = HostBuffers() if trainer.async_save else None
        self._timing = SaveTiming(trainer, checkpoint_bytes=sum(map(role_bytes, roles.values())))
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        if self._rank == 0:
            stop_request.on_request(self._tell_what_stopping_takes)

    def resume(self, found: Found | None) -> int:
        """Take up a checkpoint.

        Args:
            found: the one that was chosen (``mppo.checkpoint.resume``); None for a fresh start.

        Returns:
            The last step that is done; 0 for a fresh start.

        Raises:
            ConfigError: its position in the data means other prompts now.
        """
        if found is None:
            return 0
        try:
            self._load(found)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise not_usable(self.trainer, found.folder, error) from error
        if found.folder.parent.resolve() == self.root.resolve():
            self._pruner.sound.add(found.manifest.step)
        step_done(found.manifest.step)
        self._timing.step_done()
        return found.manifest.step

    def before_step(self) -> None:
        """Remember what the coming step changes, should it be abandoned."""
        stop_request.expect(self._timing.longest_step_s + 1.5 * self._timing.expected_save_s)
        if self.trainer.save_on_signal:
            parts = {name: part.state_dict() for name, part in self.parts.items()}
            self._before = _Before(
                json.dumps(parts), self._random_state(), self.partial_responses.responses
            )

    def before_update(self) -> None:
        """Wait until a save under way needs the models no more, which are about to change."""
        self._thread.wait_copied()

    def leave(self, step: int, reason: StepInterrupted) -> None:
        """End the run within a step that was abandoned, with a checkpoint of the one before.

        Args:
            step: the PPO step that is left.
            reason: how far it was.
        """
        name = self._stop.signal_name or "a signal on another rank"
        self._collect(self._thread.wait())
        if reason.half_done:
            self._say(f"abandoned step {step} amid its updates ({name}): no new checkpoint")
        else:
            self._say(f"abandoned step {step} ({name})")
            self._save_if_missing(step - 1, self._metrics, self._before)
        self.finish()
        self.stopped_early = True

    def rescue(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Save what is done before the run fails, and wait.

        Args:
            step: the PPO step within which it fails, before its first update.
            metrics: of the step, where it is done and its validation failed.
        """
        self._collect(self._thread.wait())
        if metrics is None:
            self._save_if_missing(step - 1, self._metrics, self._before)
        else:
            self._save_if_missing(step, metrics, None)
        self._collect(self._thread.wait())

    def _save_if_missing(
        self, done: int, metrics: Mapping[str, float], before: _Before | None
    ) -> None:
        saved = broadcast_object(done > 0 and folders.final_path(self.root, done).exists())
        if done and self.trainer.save_on_signal and not saved:
            self.save(done, metrics, before)

    def after_step(self, step: int, last: bool, metrics: Mapping[str, float]) -> bool:
        """Save if it is time to.

        Args:
            step: the PPO step that has just ended.
            last: whether it is the run's last.
            metrics: of the step, for the choice of the best checkpoint.

        Returns:
            Whether the run is to stop here.
        """
        step_done(step)
        self._metrics = metrics
        self._timing.step_done()
        self._collect(self._thread.finished())
        by_clock, stop = self._agree()
        due = by_clock or self._timing.is_due_by_step(step, last)
        if due or (stop and self.trainer.save_on_signal):
            self.save(step, metrics)
            if self.trainer.checkpoint_hf:
                kept = self.roles["actor"].weights.save(
                    self.root.parent / "hf" / f"global_step_{step}"
                )
                if kept is not None:
                    self._say(f"kept {kept}")
        if last or stop:
            self.finish()
        self.stopped_early = stop and not last
        return stop

    def save(self, step: int, metrics: Mapping[str, float], before: _Before | None = None) -> None:
        """Begin to save; with ``trainer.async_save: false``, also end it.

        Args:
            step: PPO steps done.
            metrics: of the last of them.
            before: what was remembered when it had ended; None: what is now.
        """
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
        """Write the roles as they are now to a folder outside the run's checkpoints, and wait."""
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
        """Wait for the save under way.

        Raises:
            SaveError: on every rank, where the last save failed on any.
        """
        self._collect(self._thread.wait())
        errors = all_gather_objects(self._last_error)
        if any(errors):
            first = next(error for error in errors if error)
            raise SaveError(f"the last checkpoint could not be written: {first}")
        stop_request.over()

    def _tell_what_stopping_takes(self) -> None:
        self._say(self._timing.what_stopping_takes(last_step(), stop_request.patience_s()))

    def _agree(self) -> tuple[bool, bool]:
        """What the first rank's clock says and whether anyone is asked to stop, for all ranks."""
        asked = self._stop.signal_name is not None
        clock = self._rank == 0 and self._timing.is_due_by_clock()
        limit = self._rank == 0 and self._timing.must_stop()
        flags = torch.tensor([clock, asked, limit], dtype=torch.float32, device=device.device())
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        clock, asked, limit = (bool(flag) for flag in flags.tolist())
        if asked:
            name = self._stop.signal_name or "a signal on another rank"
            self._say(f"stopping after this step: {name}")
        elif limit:
            self._say("stopping: trainer.checkpoint_must_save_by leaves no time for another step")
        return clock, asked or limit

    def _prepare(self, building: Path) -> str | None:
        """Make the folders; returns what is wrong, the same on every rank."""
        error = None
        if self._rank == 0:
            try:
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
        before: _Before | None = None,
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
            left = before.partial if before else self.partial_responses.responses
            if left:
                contents[responses.FILE] = responses.to_bytes(left)
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
            write_manifest=partial(_write_manifest, building, manifest),
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
        """Training goes on: earlier checkpoints are untouched, and the next save may succeed."""
        self.failed_saves += 1
        self._say(f"the checkpoint {path} could not be written: {why}")

    def _load(self, found: Found) -> None:
        state = read_json(found.folder / STATE, nan=True)
        load_roles(found.folder, self.roles)
        for name, part in self.parts.items():
            part.load_state_dict(state["parts"][name])
        self.partial_responses.responses = responses.load_responses(found.folder)
        layouts = {name: role.groups for name, role in self.roles.items()}
        same = found.manifest.world_size == self._world and all(
            found.manifest.roles[name]["layout"] == asdict(role.layout)
            for name, role in self.roles.items()
        )
        if same:
            load_random_state(found.folder, self._rank, layouts)
        self._say(f"resumed from {found.folder} after step {found.manifest.step}")
        if not same:
            self._say("the layout changed: random states start from trainer.seed")
        for line in changed_keys(state["recipe"], self._recipe):
            self._say(f"changed since the checkpoint: {line}")


def load_roles(folder: Path, roles: Mapping[str, Role]) -> None:
    """Take up the models and optimizers of a checkpoint. Collective.

    Raises:
        ValueError, KeyError, TypeError, OSError: it is not one, is damaged, or is of other models.
    """
    counters = read_json(folder / STATE, nan=True)["roles"]
    for name, role in roles.items():
        load_role(role, folder / name, counters[name])


def _write_manifest(building: Path, manifest: Manifest, files: dict[str, FileEntry]) -> None:
    listed = Manifest(**{**vars(manifest), "files": dict(sorted(files.items()))})
    folders.write_manifest(building, listed)

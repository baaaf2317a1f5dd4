"""The update stage of an iteration: all epochs and mini-batches of critic and actor."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from functools import partial

from mppo.batch.gathers import gather_of_mini_batch
from mppo.batch.microbatches import MicroBatchPlan
from mppo.batch.mini_batch import TOKENS_ONLY, PassInputs
from mppo.batch.outputs import Experience
from mppo.models.optimizer import StepResult
from mppo.models.role import Role, step_together
from mppo.parallel import device
from mppo.pipeline.executor import carry_out
from mppo.pipeline.timeline import Recorder
from mppo.planning.flops import peak_tflops
from mppo.planning.residency import phase_of_role
from mppo.recipe.schedule_kind import ScheduleKind, schedule_kind, update_groups
from mppo.recipe.sections.roles import ActorConfig, CriticConfig
from mppo.report.files import TIMELINES
from mppo.supervision import stop_request
from mppo.supervision.phase import phase
from mppo.supervision.stop_request import StepInterrupted
from mppo.trainer.run_roles import Roles
from mppo.trainer.targets import Targets, fetch_targets, policy_targets, value_targets
from mppo.trainer.update.objectives import PolicyObjective, ValueObjective
from mppo.trainer.update.role_update import RoleUpdate
from mppo.trainer.update.streamed import StreamedUpdate, write_timeline


class NonFiniteStep(RuntimeError):
    """A role's loss or gradient is inf or nan and the run stops; no role took the step. ``results``
    are by role; ``mini_batch`` has the indices of its sequences."""

    def __init__(
        self, when: str, results: Mapping[str, StepResult], fix: str, mini_batch: tuple[int, ...]
    ) -> None:
        self.mini_batch = mini_batch
        numbers = "; ".join(
            f"{name}: loss {result.loss}, norm {result.grad_norm}"
            for name, result in results.items()
        )
        names = " and ".join(results)
        super().__init__(
            f"loss or gradient norm at {when} is not finite ({numbers}); "
            f"{names} took no step: {fix}"
        )


class UpdatePhase:
    """The update of critic and actor: all epochs and mini-batches of one iteration. The actor is
    frozen by ``trainer.critic_warmup``, the critic in a batch that value pretraining holds out. Of
    ``updates`` the critic's is first."""

    def __init__(
        self,
        roles: Roles,
        experience: Experience,
        step: int,
        actor_frozen: bool,
        critic_frozen: bool = False,
    ) -> None:
        self._roles, self.experience, self.step = roles, experience, step
        self._gather = partial(gather_of_mini_batch, experience.old.batch)
        self.updates: list[RoleUpdate] = []
        if roles.critic is not None and not critic_frozen:
            self.updates.append(self._critic_update(roles.critic))
        if roles.actor.settings.trained and not actor_frozen:
            self.updates.append(self._actor_update())
        self.kind: ScheduleKind = "sequential"
        if len(self.updates) > 1:
            self.kind = schedule_kind(roles.recipe)
        self._align = roles.recipe.trainer.align_overflow

    def run(self) -> None:
        """Compute all gradients and take all optimizer steps. Collective. NonFiniteStep: a loss or
        gradient is not finite, and ``trainer.on_nonfinite`` is "stop" or this is the
        ``trainer.max_nonfinite_in_a_row``-th such step in a row. StepInterrupted: a stop was
        requested, and the rest of the update would take too long."""
        for update in self.updates:
            assert update.role.optimizer is not None, f"{update.role.name} is frozen"
            update.learning_rate = update.role.optimizer.advance()
        records = self.step in self._roles.recipe.trainer.timeline.steps and self.updates
        if self.kind == "sequential" and not records:
            return self._run_sequentially()
        balance = None if self.kind == "sequential" else self._roles.slot_balance
        measures = balance is not None and balance.wants_times
        recorder = Recorder() if records or measures else None
        names = [update.role.name for update in self.updates]
        self._enter(names[0])
        with phase("updating in one stream", self.step):
            streamed = self._streamed()
            with streamed.timing():
                finished = carry_out(
                    streamed.actions,
                    streamed.work,
                    streamed.links,
                    {name: f"updating {name}" for name in names},
                    streamed.take_step,
                    streamed.rest_after,
                    recorder,
                )
            streamed.finish()
        if not finished:
            raise StepInterrupted(half_done=True)
        if balance is not None:
            tokens = {update.role.name: update.tokens for update in self.updates}
            balance.after_update([] if recorder is None else recorder.events, tokens)
        if recorder is not None and records:
            folder = self._roles.recipe.trainer.run_dir / TIMELINES
            write_timeline(folder, self.step, streamed.schedule, recorder.events)
        return None

    def _run_sequentially(self) -> None:
        """Train the groups of roles one after another; per round of a group, compute the i-th
        gradient of every role, then take the roles' steps."""
        began = time.monotonic()
        by_name = {update.role.name: update for update in self.updates}
        groups = [
            [by_name[name] for name in group if name in by_name]
            for group in update_groups(self._roles.recipe)
        ]
        rounds = [
            (group, i)
            for group in groups
            for i in range(max((len(update.mini_batches) for update in group), default=0))
        ]
        for done, (group, i) in enumerate(rounds):
            if done:
                stop_request.sync_between_updates(done, len(rounds), began)
            updates = [update for update in group if i < len(update.mini_batches)]
            self._enter(updates[0].role.name)
            for update in updates:
                with phase(f"updating {update.role.name}", self.step), update.timing():
                    update.run_once(self.experience.old.batch, tuple(update.mini_batches[i]))
            for together in [updates] if self._align else [[update] for update in updates]:
                names = " and ".join(update.role.name for update in together)
                with phase(f"stepping {names}", self.step):
                    self._step(together, i)

    def _enter(self, role: str) -> None:
        with phase(f"updating {role}", self.step):
            self._roles.placement.enter(phase_of_role(self._roles.recipe, "update", role))

    def _streamed(self) -> StreamedUpdate:
        began, batch = time.monotonic(), self.experience.old.batch

        def is_late(done: int, of: int) -> bool:
            return bool(done) and stop_request.late_between_updates(done, of, began)

        return StreamedUpdate(
            self.kind, self.updates, batch, self._align, self._count_skipped, is_late
        )

    def metrics(self) -> dict[str, float]:
        """Metrics over all mini-batches of all roles; call after ``run``. Collective."""
        for name in self._roles.trained:
            self._roles.seconds.pop(f"update_{name}", None)
        for update in self.updates:
            self._roles.seconds[f"update_{update.role.name}"] = update.seconds
        balance = self._roles.slot_balance
        metrics = {} if balance is None else balance.metrics()
        for update in self.updates:
            metrics |= update.metrics()
        return metrics

    def _critic_update(self, critic: Role) -> RoleUpdate:
        section, longest = self._roles.recipe.critic, self._roles.recipe.data.max_response_length
        unit = self._roles.recipe.algorithm.gae_unit
        size = section.ppo_mini_batch_size or self._roles.recipe.actor.ppo_mini_batch_size

        def objective_of(sequences: tuple[int, ...], plan: MicroBatchPlan) -> ValueObjective:
            targets = value_targets(
                self.experience, sequences, section, longest, self._gather, unit
            )
            return ValueObjective(*self._fetch(targets, sequences, plan, critic), section)

        return RoleUpdate(
            critic,
            self._mini_batches(size, section),
            objective_of,
            self._roles.flops["critic"],
            peak_tflops=self._peak_tflops(),
            epochs=section.ppo_epochs,
        )

    def _actor_update(self) -> RoleUpdate:
        section, longest = self._roles.recipe.actor, self._roles.recipe.data.max_response_length
        correction, inputs = self._roles.recipe.algorithm.rollout_correction, TOKENS_ONLY
        if section.learns_full_kl:
            inputs = PassInputs(self.experience.old.ref_hidden_T)

        def objective_of(sequences: tuple[int, ...], plan: MicroBatchPlan) -> PolicyObjective:
            targets = policy_targets(
                self.experience, sequences, section, longest, self.step, self._gather
            )
            return PolicyObjective(
                *self._fetch(targets, sequences, plan, self._roles.actor), section, correction
            )

        return RoleUpdate(
            self._roles.actor,
            self._mini_batches(section.ppo_mini_batch_size, section),
            objective_of,
            self._roles.flops["actor"],
            inputs,
            self._roles.text,
            self._peak_tflops(),
        )

    def _fetch(
        self, targets: Targets, sequences: tuple[int, ...], plan: MicroBatchPlan, role: Role
    ) -> tuple[Targets, tuple[int, ...]]:
        batch = self.experience.old.batch
        held = [i for i, place in zip(sequences, batch.places(sequences).tolist()) if place >= 0]
        return fetch_targets(targets, held, batch, plan, role.layout)

    def _peak_tflops(self) -> float | None:
        """Peak TFLOP/s of a rank's device: the recipe's value, else the device's in bfloat16."""
        stated = self._roles.recipe.trainer.peak_tflops_per_rank
        if stated is None and self._roles.recipe.model.dtype == "bfloat16":
            return peak_tflops(device.name())
        return stated

    def _mini_batches(self, size: int, section: ActorConfig | CriticConfig) -> list[list[int]]:
        """Sequence indices of every mini-batch of every epoch; ``size`` is in prompts, and the
        sequences of an episode are in one mini-batch."""
        index = self.experience.old.batch.episodes
        episodes = list(range(len(index.last_E)))
        per_mini_batch = size * self._roles.recipe.rollout.n
        shuffler = random.Random(self._roles.recipe.trainer.seed + self.step)
        chosen = []
        for _ in range(section.ppo_epochs):
            order = shuffler.sample(episodes, len(episodes)) if section.shuffle else episodes
            parts = [order[i : i + per_mini_batch] for i in range(0, len(order), per_mini_batch)]
            chosen += [index.sequences(part) for part in parts]
        return chosen

    def _step(self, updates: Sequence[RoleUpdate], mini_batch: int) -> None:
        """Take the roles' optimizer steps together, or skip all of them if one is not finite."""
        start = time.perf_counter()
        results = step_together([update.role for update in updates])
        for update in updates:
            update.norms.append(results[update.role.name].grad_norm)
            update.seconds += (time.perf_counter() - start) / len(updates)
        self._count_skipped(results, mini_batch)

    def _count_skipped(self, results: Mapping[str, StepResult], mini_batch: int) -> None:
        """Count skipped steps, and each role's consecutive ones; NonFiniteStep as in ``run``."""
        roles, trainer = self._roles, self._roles.recipe.trainer
        if all(result.applied for result in results.values()):
            roles.skipped_in_a_row |= dict.fromkeys(results, 0)
            return
        roles.skipped_steps += 1
        for name in results:
            roles.skipped_in_a_row[name] = roles.skipped_in_a_row.get(name, 0) + 1
        in_a_row = max(roles.skipped_in_a_row[name] for name in results)
        stop = trainer.on_nonfinite == "stop"
        if stop or in_a_row >= trainer.max_nonfinite_in_a_row:
            last = "set trainer.on_nonfinite=skip" if stop else "raise max_nonfinite_in_a_row"
            fix = f"lower their optim.lr, look at the rewards, or {last}"
            when = f"step {self.step}, {in_a_row} time(s) in a row,"
            update = next(update for update in self.updates if update.role.name in results)
            sequences = tuple(update.mini_batches[mini_batch])
            raise NonFiniteStep(when, results, fix, sequences)

"""The update stage of an iteration: all epochs and mini-batches of critic and actor."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

from mppo.batch import Experience
from mppo.config.sections.roles import ActorConfig, CriticConfig
from mppo.models.optimizer import StepResult
from mppo.models.role import step_together
from mppo.models.role_spec import TOKENS_ONLY, PassInputs
from mppo.parallel import device
from mppo.pipeline.schedule import Action, joint_rounds, update_schedule
from mppo.planning.peak_flops import peak_tflops
from mppo.supervision.phase import phase
from mppo.trainer.losses import (
    PolicyObjective,
    ValueObjective,
    policy_targets,
    to_device,
    value_targets,
)
from mppo.trainer.role_update import RoleUpdate
from mppo.trainer.roles import Roles


class NonFiniteStep(RuntimeError):
    """A role's loss or gradient was inf or nan and the run stops; no role took the step.

    Args:
        when: the step.
        results: of every role that was to step, by name.
        fix: what to change.
        mini_batch: indices of the sequences the gradient was computed from.
    """

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
    """All mini-batches of critic and actor, side by side.

    Args:
        roles: the models.
        experience: what they are trained on.
        step: the PPO step.
        actor_frozen: only the critic learns (``trainer.critic_warmup``).

    Attributes:
        updates: the roles that learn, the critic first.
        rounds: for each mini-batch the gradients, then the optimizer steps taken together.
    """

    def __init__(self, roles: Roles, experience: Experience, step: int, actor_frozen: bool) -> None:
        self._roles, self.experience, self.step = roles, experience, step
        self.updates = [] if roles.critic is None else [self._critic_update()]
        if not actor_frozen:
            self.updates.append(self._actor_update())
        self._by_name = {update.role.name: update for update in self.updates}
        lengths = experience.old.batch.lengths_B.tolist()
        schedules = []
        for update in self.updates:
            spec = update.role.micro_batch_spec(training=True)
            schedules.append(update_schedule(lengths, spec, update.mini_batches))
        self.rounds: list[list[Action]] = joint_rounds(schedules)

    def run_round(self, actions: Sequence[Action]) -> None:
        """The gradients and optimizer steps of one round; collective.

        Raises:
            NonFiniteStep: a loss or gradient was not finite and the recipe says to stop, or for the
                ``trainer.max_nonfinite_in_a_row``-th time in a row.
        """
        if actions is self.rounds[0]:
            for update in self.updates:
                update.learning_rate = update.role.optimizer.advance()
        for action in actions:
            if action.kind == "forward_backward":
                update = self._by_name[action.role]
                with phase(f"updating {action.role}", self.step), update.timing():
                    mini_batch = update.mini_batch(self.experience.old.batch, action)
                    update.stats.append(update.role.forward_backward(mini_batch))
        stepping = [a.role for a in actions if a.kind == "optimizer_step"]
        with phase(f"stepping {' and '.join(stepping)}", self.step):
            self._step([self._by_name[name] for name in stepping], actions[0].mini_batch)

    def metrics(self) -> dict[str, float]:
        """Of all mini-batches of all roles, once they are done; collective."""
        for update in self.updates:
            self._roles.seconds[f"update_{update.role.name}"] = update.seconds
        return {name: value for update in self.updates for name, value in update.metrics().items()}

    def _critic_update(self) -> RoleUpdate:
        section, longest = self._roles.recipe.critic, self._roles.recipe.data.max_response_length
        size = section.ppo_mini_batch_size or self._roles.recipe.actor.ppo_mini_batch_size

        def objective_of(sequences: tuple[int, ...]) -> ValueObjective:
            targets = value_targets(self.experience, sequences, section, longest)
            return ValueObjective(to_device(targets, device.device()), sequences, section)

        return RoleUpdate(
            self._roles.critic,
            self._mini_batches(size, section),
            objective_of,
            self._roles.flops["critic"],
            peak_tflops=self._peak_tflops(),
        )

    def _actor_update(self) -> RoleUpdate:
        section, longest = self._roles.recipe.actor, self._roles.recipe.data.max_response_length
        inputs = TOKENS_ONLY
        if section.learns_full_kl:
            inputs = PassInputs(self.experience.old.ref_hidden_T)

        def objective_of(sequences: tuple[int, ...]) -> PolicyObjective:
            targets = policy_targets(self.experience, sequences, section, longest, seed=self.step)
            return PolicyObjective(to_device(targets, device.device()), sequences, section)

        return RoleUpdate(
            self._roles.actor,
            self._mini_batches(section.ppo_mini_batch_size, section),
            objective_of,
            self._roles.flops["actor"],
            inputs,
            self._roles.text,
            self._peak_tflops(),
        )

    def _peak_tflops(self) -> float | None:
        """The recipe's peak of a rank's device, or the device's own in bfloat16."""
        stated = self._roles.recipe.trainer.peak_tflops_per_rank
        if stated is None and self._roles.recipe.model.dtype == "bfloat16":
            return peak_tflops(device.name())
        return stated

    def _mini_batches(self, size: int, section: ActorConfig | CriticConfig) -> list[list[int]]:
        """Sequence indices of every mini-batch of every epoch; ``size`` counts prompts."""
        sequences = list(range(self.experience.old.batch.num_sequences))
        per_mini_batch = size * self._roles.recipe.rollout.n
        shuffler = random.Random(self._roles.recipe.trainer.seed + self.step)
        chosen = []
        for _ in range(section.ppo_epochs):
            order = shuffler.sample(sequences, len(sequences)) if section.shuffle else sequences
            chosen += [order[i : i + per_mini_batch] for i in range(0, len(order), per_mini_batch)]
        return chosen

    def _step(self, updates: Sequence[RoleUpdate], mini_batch: tuple[int, ...]) -> None:
        """Take the optimizer steps of a round together, or leave all of them out."""
        start = time.perf_counter()
        results = step_together([update.role for update in updates])
        for update in updates:
            update.norms.append(results[update.role.name].grad_norm)
            update.seconds += (time.perf_counter() - start) / len(updates)
        if all(result.applied for result in results.values()):
            self._roles.skipped_in_a_row = 0
            return
        self._roles.skipped_steps += 1
        self._roles.skipped_in_a_row += 1
        trainer = self._roles.recipe.trainer
        in_a_row, stop = self._roles.skipped_in_a_row, trainer.on_nonfinite == "stop"
        if stop or in_a_row >= trainer.max_nonfinite_in_a_row:
            last = "set trainer.on_nonfinite=skip" if stop else "raise max_nonfinite_in_a_row"
            fix = f"lower their optim.lr, look at the rewards, or {last}"
            when = f"step {self.step}, {in_a_row} time(s) in a row,"
            raise NonFiniteStep(when, results, fix, mini_batch)

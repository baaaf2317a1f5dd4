"""The models of a run: who takes part, and what they do in the measure and update stages."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mppo.batch import Batch, Experience, Measured
from mppo.checkpoint.role_state import describe_model
from mppo.config.schema import Recipe
from mppo.data.builtin import resolve_model
from mppo.models.configuration import DTYPES
from mppo.models.flops import update_flops
from mppo.models.optimizer import StepResult
from mppo.models.role import Role, step_together
from mppo.models.role_spec import PLAIN, Extras, Outputs, RoleSpec
from mppo.objective import (
    policy_objective,
    policy_targets,
    select,
    to_device,
    update_metrics,
    value_objective,
    value_targets,
)
from mppo.parallel import device
from mppo.parallel.abandon import meet, meet_half_done
from mppo.parallel.groups import GroupRegistry
from mppo.parallel.peak import peak_tflops
from mppo.parallel.phase import phase
from mppo.parallel.schedule import Action, joint_rounds, measure_schedule, update_schedule
from mppo.plain_text import PlainText


class NonFiniteStep(RuntimeError):
    """A role's loss or gradient was inf or nan and the run stops; no role took the step.

    Args:
        when: the step.
        results: of every role that was to step, by name.
        cure: what to change.
        mini_batch: indices of the sequences the gradient was computed from.
    """

    def __init__(
        self, when: str, results: Mapping[str, StepResult], cure: str, mini_batch: tuple[int, ...]
    ) -> None:
        self.mini_batch = mini_batch
        numbers = "; ".join(
            f"{name}: loss {result.loss}, norm {result.grad_norm}"
            for name, result in results.items()
        )
        names = " and ".join(results)
        super().__init__(
            f"loss or gradient norm at {when} is not finite ({numbers}); "
            f"{names} took no step: {cure}"
        )


@dataclass
class Learner:
    """A role's part in the update stage.

    Args:
        role: who learns.
        mini_batches: sequence indices of each of its steps.
        targets_of: what a mini-batch is trained towards.
        objective: loss and statistics from outputs and targets.
        extras: what its passes are given besides tokens.
        text: documents that ride along with every mini-batch.
        peak_tflops: of one rank's device; None where it is not known.
    """

    role: Role
    mini_batches: list[list[int]]
    targets_of: Callable[[tuple[int, ...]], Any]
    objective: Callable[..., Any]
    extras: Extras = PLAIN
    text: PlainText | None = None
    peak_tflops: float | None = None
    learning_rate: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0
    stats: list[dict[str, float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def accumulate(self, batch: Batch, action: Action) -> None:
        """The gradient of one mini-batch."""
        start = time.perf_counter()
        targets = to_device(self.targets_of(action.mini_batch), device.device())
        place = {index: i for i, index in enumerate(action.mini_batch)}

        def micro_objective(outputs, indices):
            return self.objective(outputs, select(targets, [place[i] for i in indices]))

        plan, extras, whole_objective = action.microbatches, self.extras, micro_objective
        if self.text is not None:
            extras = replace(extras, text_from=batch.num_sequences)
            shape = self.role.shape(measuring=False)
            batch, plan, whole_objective = self.text.join(batch, plan, shape, micro_objective)
        mask_T = self.role.predicted_mask_T(batch)
        self.flops += update_flops(self.role.flops, batch, plan, mask_T)
        self.stats.append(self.role.forward_backward(batch, plan, whole_objective, extras))
        device.synchronize()
        self.seconds += time.perf_counter() - start

    def run_once(self, batch: Batch, mini_batch: tuple[int, ...]) -> None:
        """The gradient of one mini-batch, outside any schedule."""
        shape = self.role.shape(measuring=False)
        self.accumulate(batch, update_schedule(batch.lengths_B.tolist(), shape, [mini_batch])[0])

    def metrics(self) -> dict[str, float]:
        """Of all mini-batches, once they are done."""
        name = self.role.name
        return update_metrics(self.stats) | {
            f"{name}/grad_norm": sum(self.norms) / len(self.norms),
            f"{name}/lr": self.learning_rate,
            **self.role.routing_metrics(),
            **self._work_metrics(),
        }

    def _work_metrics(self) -> dict[str, float]:
        """TFLOP/s of each rank over this update, and their share of the peak where it is known."""
        name, ranks = self.role.name, torch.distributed.get_world_size()
        rate = self.flops / self.seconds / ranks / 1e12
        metrics = {f"perf/tflops_per_rank/{name}": rate}
        if self.peak_tflops is not None:
            metrics[f"perf/mfu/{name}"] = rate / self.peak_tflops
        return metrics


def trained_models(recipe: Recipe, folder: Path, load_config) -> dict[str, dict[str, Any]]:
    """``describe_model`` of the roles that learn, by name, before they are built.

    Args:
        recipe: the recipe.
        folder: what the actor starts from.
        load_config: reads the config of such a folder.
    """
    folders = {"actor": ("policy", folder)}
    if recipe.algorithm.uses_critic:
        path = recipe.critic.path
        folders["critic"] = ("value", resolve_model(path) if path else folder)
    dtype = DTYPES[recipe.model.dtype]
    return {
        name: describe_model(load_config(where), head, dtype)
        for name, (head, where) in folders.items()
    }


MEASURED = {"actor": "old_log_prob", "ref": "ref", "critic": "values"}
"""verl's name for what each role's measuring pass yields, under which it is timed."""


class Roles:
    """Actor, and critic and reference where the recipe uses them.

    Args:
        recipe: the recipe.
        folder: Hugging Face folder or checkpoint the actor starts from (critic and reference too,
            unless they name their own).
        load_config: reads the config of such a folder.
        registry: process groups by layout.
        total_steps: PPO steps of the run, for the learning-rate schedules.
        text: documents for the unsupervised loss, where the recipe asks for it.

    ``seconds`` says how long each role's last measuring pass and update took.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        load_config,
        registry: GroupRegistry,
        total_steps: int,
        text: PlainText | None = None,
    ) -> None:
        self.recipe = recipe
        self.text = text
        world = torch.distributed.get_world_size()
        dtype = DTYPES[recipe.model.dtype]
        # greedy sampling has no distribution of its own; the model's is meant
        temperature = recipe.rollout.temperature or 1.0

        def build(name, head, section, path, megatron, optim) -> Role:
            where = resolve_model(path) if path else folder
            spec = RoleSpec(
                name=name,
                head=head,
                folder=where,
                dtype=dtype,
                megatron=megatron,
                batching=section,
                temperature=temperature,
                optim=optim,
                total_steps=total_steps,
                router_replay=getattr(section, "router_replay", "off"),
                ema_decay=getattr(section, "ema_decay", None),
            )
            with phase(f"building {name}"):
                return Role(spec, load_config(where), registry.of(megatron.layout(world)))

        actor, critic, ref = recipe.actor, recipe.critic, recipe.ref
        self.actor = build("actor", "policy", actor, None, actor.megatron, actor.optim)
        self.critic: Role | None = None
        if recipe.algorithm.uses_critic:
            self.critic = build(
                "critic", "value", critic, critic.path, critic.megatron, critic.optim
            )
        self.ref: Role | None = None
        if recipe.uses_reference:
            batching = ref.batching(actor)
            self.ref = build(
                "ref", "policy", batching, ref.path, ref.megatron or actor.megatron, None
            )
            if recipe.measures_full_kl:
                self.actor.compare_with(self.ref, recipe.rollout.sync_bucket_mb << 20)
        self.seconds: dict[str, float] = {}
        self.skipped_steps = 0
        self._skipped_in_a_row = 0

    @property
    def trained(self) -> dict[str, Role]:
        """The roles that learn, by name: what a checkpoint holds."""
        roles = (self.actor, self.critic)
        return {role.name: role for role in roles if role is not None}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides models and optimizers."""
        return {
            "skipped_steps": self.skipped_steps,
            "in_a_row": self._skipped_in_a_row,
            "text": None if self.text is None else self.text.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        if self.text is not None and state.get("text"):
            self.text.load_state_dict(state["text"])
        self.skipped_steps = int(state["skipped_steps"])
        self._skipped_in_a_row = int(state["in_a_row"])

    def measure(self, batch: Batch) -> Measured:
        """What actor, reference and critic say of the batch, before any update.

        The actor is not asked where the recipe takes the engine's log-probabilities for its own.
        """
        actor = self.actor if self.recipe.measures_actor else None
        roles = [role for role in (self.ref, actor, self.critic) if role is not None]
        actions = measure_schedule(
            batch.lengths_B.tolist(), [role.shape(measuring=True) for role in roles]
        )
        outputs: dict[str, Outputs] = {}
        ref_hidden_T = None
        for role, action in zip(roles, actions):
            plan, start = action.microbatches, time.perf_counter()
            with phase(f"measuring with {role.name}"):
                if role is self.ref and self.recipe.measures_full_kl:
                    outputs["ref"], ref_hidden_T = role.measure_states(batch, plan)
                elif role is self.actor:
                    outputs["actor"] = role.measure(batch, plan, Extras(ref_hidden_T))
                else:
                    outputs[role.name] = role.measure(batch, plan)
                meet()
            self.seconds[MEASURED[role.name]] = time.perf_counter() - start
        logprobs_T, full_kl_T = batch.rollout_logprobs_T, None
        if actor is not None:
            logprobs_T, _, *full_kl_T = outputs["actor"]
        return Measured(
            batch=batch,
            logprobs_T=logprobs_T,
            ref_logprobs_T=outputs["ref"][0] if self.ref else logprobs_T,
            values_T=outputs["critic"][0] if self.critic else torch.zeros_like(logprobs_T),
            full_kl_T=full_kl_T[0] if full_kl_T else None,
            ref_hidden_T=ref_hidden_T if self.recipe.actor.learns_full_kl else None,
        )

    def update(self, experience: Experience, step: int, actor_frozen: bool) -> dict[str, float]:
        """All epochs and mini-batches of critic and actor, side by side; their metrics.

        Raises:
            NonFiniteStep: a loss or gradient was not finite and the recipe says to stop, or for the
                ``trainer.max_nonfinite_in_a_row``-th time in a row.
            Abandoned: the run is asked to stop and the rest would take too long.
        """
        learners = self.learners(experience, step, actor_frozen)
        by_name = {learner.role.name: learner for learner in learners}
        batch = experience.measured.batch
        lengths = batch.lengths_B.tolist()
        schedules = []
        for learner in learners:
            shape = learner.role.shape(measuring=False)
            schedules.append(update_schedule(lengths, shape, learner.mini_batches))
            learner.learning_rate = learner.role.optimizer.advance()
        began, rounds = time.monotonic(), joint_rounds(schedules)
        for done, actions in enumerate(rounds):
            if done:
                meet_half_done(done, len(rounds), began)
            for action in actions:
                if action.kind == "forward_backward":
                    with phase(f"updating {action.role}", step):
                        by_name[action.role].accumulate(batch, action)
            stepping = [a.role for a in actions if a.kind == "optimizer_step"]
            with phase(f"stepping {' and '.join(stepping)}", step):
                self._step([by_name[name] for name in stepping], actions[0].mini_batch, step)
        for learner in learners:
            self.seconds[f"update_{learner.role.name}"] = learner.seconds
        return {name: value for learner in learners for name, value in learner.metrics().items()}

    def learners(self, experience: Experience, step: int, actor_frozen: bool) -> list[Learner]:
        """Who learns from an experience, and how."""
        learners = [] if self.critic is None else [self._critic_learner(experience, step)]
        return learners + ([] if actor_frozen else [self._actor_learner(experience, step)])

    def _critic_learner(self, experience: Experience, step: int) -> Learner:
        section, longest = self.recipe.critic, self.recipe.data.max_response_length
        size = section.ppo_mini_batch_size or self.recipe.actor.ppo_mini_batch_size
        return Learner(
            self.critic,
            self._mini_batches(experience, size, section, step),
            partial(value_targets, experience, critic=section, max_response_length=longest),
            lambda outputs, targets: value_objective(*outputs, targets, section),
            peak_tflops=self._peak_tflops(),
        )

    def _actor_learner(self, experience: Experience, step: int) -> Learner:
        section, extras = self.recipe.actor, PLAIN
        if section.learns_full_kl:
            extras = Extras(experience.measured.ref_hidden_T)
        return Learner(
            self.actor,
            self._mini_batches(experience, section.ppo_mini_batch_size, section, step),
            partial(
                policy_targets,
                experience,
                actor=section,
                max_response_length=self.recipe.data.max_response_length,
                seed=step,
            ),
            lambda outputs, targets: policy_objective(*outputs[:2], targets, section, *outputs[2:]),
            extras,
            self.text,
            self._peak_tflops(),
        )

    def _peak_tflops(self) -> float | None:
        """The recipe's peak of a rank's device, or the device's own in bfloat16."""
        stated = self.recipe.trainer.peak_tflops_per_rank
        if stated is None and self.recipe.model.dtype == "bfloat16":
            return peak_tflops(device.name())
        return stated

    def _mini_batches(
        self, experience: Experience, size: int, section, step: int
    ) -> list[list[int]]:
        """Sequence indices of every mini-batch of every epoch; ``size`` counts prompts."""
        sequences = list(range(experience.measured.batch.num_sequences))
        per_mini_batch = size * self.recipe.rollout.n
        shuffler = random.Random(self.recipe.trainer.seed + step)
        chosen = []
        for _ in range(section.ppo_epochs):
            order = shuffler.sample(sequences, len(sequences)) if section.shuffle else sequences
            chosen += [order[i : i + per_mini_batch] for i in range(0, len(order), per_mini_batch)]
        return chosen

    def _step(self, learners: Sequence[Learner], mini_batch: tuple[int, ...], step: int) -> None:
        """Take the optimizer steps of a round together, or leave all of them out."""
        start = time.perf_counter()
        results = step_together([learner.role for learner in learners])
        for learner in learners:
            learner.norms.append(results[learner.role.name].grad_norm)
            learner.seconds += (time.perf_counter() - start) / len(learners)
        if all(result.applied for result in results.values()):
            self._skipped_in_a_row = 0
            return
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        trainer = self.recipe.trainer
        in_a_row, stop = self._skipped_in_a_row, trainer.on_nonfinite == "stop"
        if stop or in_a_row >= trainer.max_nonfinite_in_a_row:
            last = "set trainer.on_nonfinite=skip" if stop else "raise max_nonfinite_in_a_row"
            cure = f"lower their optim.lr, look at the rewards, or {last}"
            when = f"step {step}, {in_a_row} time(s) in a row,"
            raise NonFiniteStep(when, results, cure, mini_batch)

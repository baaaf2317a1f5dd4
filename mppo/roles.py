"""The models of a run: who takes part, and what they do in the measure and update stages."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import torch

from mppo.batch import Batch, Experience, Measured
from mppo.config.schema import Recipe
from mppo.estimate import needs_critic
from mppo.models.configuration import DTYPES, layout_of
from mppo.models.role import Role, RoleSpec
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
from mppo.parallel.groups import GroupRegistry
from mppo.parallel.phase import phase
from mppo.parallel.schedule import Action, measure_schedule, update_schedule


class NonFiniteGradient(RuntimeError):
    """A role's gradient was inf or nan and the recipe says to stop; its weights are untouched."""


def needs_reference(recipe: Recipe) -> bool:
    """Whether any term of the recipe compares with a reference policy."""
    return recipe.algorithm.use_kl_in_reward or recipe.actor.use_kl_loss


class Roles:
    """Actor, and critic and reference where the recipe uses them.

    Args:
        recipe: the recipe.
        folder: Hugging Face folder the actor starts from (critic and reference too, unless they
            name their own).
        load_config: reads the config of such a folder.
        registry: process groups by layout.
        total_steps: PPO steps of the run, for the learning-rate schedules.
    """

    def __init__(
        self, recipe: Recipe, folder: Path, load_config, registry: GroupRegistry, total_steps: int
    ) -> None:
        self.recipe = recipe
        world = torch.distributed.get_world_size()
        dtype = DTYPES[recipe.model.dtype]
        # greedy sampling has no distribution of its own; the model's is meant
        temperature = recipe.rollout.temperature or 1.0

        def build(name, head, section, path, megatron, optim) -> Role:
            where = Path(path) if path else folder
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
            )
            with phase(f"building {name}"):
                return Role(spec, load_config(where), registry.of(layout_of(megatron, world)))

        actor, critic, ref = recipe.actor, recipe.critic, recipe.ref
        self.actor = build("actor", "policy", actor, None, actor.megatron, actor.optim)
        self.critic: Role | None = None
        if needs_critic(recipe.algorithm):
            self.critic = build(
                "critic", "value", critic, critic.path, critic.megatron, critic.optim
            )
        self.ref: Role | None = None
        if needs_reference(recipe):
            self.ref = build("ref", "policy", ref, ref.path, ref.megatron or actor.megatron, None)
        self.skipped_steps = 0

    @property
    def trained(self) -> dict[str, Role]:
        """The roles that learn, by name: what a checkpoint holds."""
        roles = (self.actor, self.critic)
        return {role.name: role for role in roles if role is not None}

    def state_dict(self) -> dict[str, int]:
        """What a resumed run needs besides models and optimizers."""
        return {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a saved state."""
        self.skipped_steps = int(state["skipped_steps"])

    def measure(self, batch: Batch) -> Measured:
        """What actor, reference and critic say of the batch, before any update."""
        roles = [role for role in (self.actor, self.ref, self.critic) if role is not None]
        actions = measure_schedule(
            batch.lengths_B.tolist(), [role.shape(measuring=True) for role in roles]
        )
        outputs = {}
        for role, action in zip(roles, actions):
            with phase(f"measuring with {role.name}"):
                outputs[role.name] = role.measure(batch, action.microbatches)
        logprobs_T, entropy_T = outputs["actor"]
        return Measured(
            batch=batch,
            logprobs_T=logprobs_T,
            entropy_T=entropy_T,
            ref_logprobs_T=outputs["ref"][0] if self.ref else logprobs_T,
            values_T=outputs["critic"][0] if self.critic else torch.zeros_like(logprobs_T),
        )

    def update_critic(self, experience: Experience, step: int) -> dict[str, float]:
        """All epochs and mini-batches of the critic; its metrics."""
        if self.critic is None:
            return {}
        section = self.recipe.critic
        size = section.ppo_mini_batch_size or self.recipe.actor.ppo_mini_batch_size
        mini_batches = self._mini_batches(experience, size, section, step)
        return self._update(
            self.critic,
            experience,
            mini_batches,
            partial(value_targets, experience, critic=section),
            lambda outputs, targets: value_objective(*outputs, targets, section),
            step,
        )

    def update_actor(self, experience: Experience, step: int) -> dict[str, float]:
        """All epochs and mini-batches of the actor; its metrics."""
        section = self.recipe.actor
        mini_batches = self._mini_batches(experience, section.ppo_mini_batch_size, section, step)
        return self._update(
            self.actor,
            experience,
            mini_batches,
            partial(policy_targets, experience, actor=section, seed=step),
            lambda outputs, targets: policy_objective(*outputs, targets, section),
            step,
        )

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

    def _update(
        self, role: Role, experience: Experience, mini_batches, targets_of, objective, step: int
    ) -> dict[str, float]:
        batch = experience.measured.batch
        schedule = update_schedule(
            batch.lengths_B.tolist(), role.shape(measuring=False), mini_batches
        )
        learning_rate = role.optimizer.advance()
        stats, norms = [], []
        for action in schedule:
            with phase(f"updating {role.name}", step=step):
                if action.kind == "forward_backward":
                    targets = to_device(targets_of(action.mini_batch), device.device())
                    stats.append(self._accumulate(role, batch, action, targets, objective))
                else:
                    norms.append(self._step(role, step))
        metrics = update_metrics(stats)
        metrics[f"{role.name}/grad_norm"] = sum(norms) / len(norms)
        metrics[f"{role.name}/lr"] = learning_rate
        return metrics | role.routing_metrics()

    def _accumulate(self, role: Role, batch: Batch, action: Action, targets, objective):
        place = {index: i for i, index in enumerate(action.mini_batch)}

        def micro_objective(outputs, indices):
            return objective(outputs, select(targets, [place[i] for i in indices]))

        return role.forward_backward(batch, action.microbatches, micro_objective)

    def _step(self, role: Role, step: int) -> float:
        result = role.optimizer_step()
        if not result.applied:
            if self.recipe.trainer.on_nonfinite == "stop":
                raise NonFiniteGradient(
                    f"{role.name}: gradient norm is {result.grad_norm} at step {step}; its weights "
                    f"are untouched. Lower {role.name}.optim.lr, or set "
                    f"trainer.on_nonfinite=skip to leave such steps out"
                )
            self.skipped_steps += 1
        return result.grad_norm

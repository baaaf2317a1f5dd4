"""The models of a run, and how each is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mppo.checkpoint.role_state import describe_model
from mppo.config.rules.rule import roles_in_use
from mppo.config.schema import Recipe
from mppo.hub.builtin import resolve_model
from mppo.models.configuration import DTYPES
from mppo.models.role import Role
from mppo.models.role_spec import RoleSpec
from mppo.parallel.groups import GroupRegistry
from mppo.planning.fit import own_gpu, planned_residency
from mppo.planning.flops import model_flops
from mppo.planning.plan import token_costs, with_token_budgets
from mppo.planning.residency import Residency
from mppo.planning.token_budgets import given_budgets
from mppo.rewards.reward_model.scale import RewardModelScale
from mppo.supervision.phase import phase
from mppo.trainer.pretraining_mix import PretrainingMix
from mppo.trainer.residency import RolePlacement
from mppo.trainer.update.slot_balance import SlotBalance


def trained_models(recipe: Recipe, folder: Path, load_config) -> dict[str, dict[str, Any]]:
    """``describe_model`` of the trained roles, by name, without building them.

    Args:
        recipe: the recipe.
        folder: the actor's initial weights.
        load_config: reads the Hugging Face config of a folder.
    """
    folders, heads = _model_folders(recipe, folder), {"actor": "policy", "critic": "value"}
    dtype = DTYPES[recipe.model.dtype]
    return {
        name: describe_model(load_config(folders[name]), head, dtype)
        for name, head in heads.items()
        if name in folders
    }


def _model_folders(recipe: Recipe, folder: Path) -> dict[str, Path]:
    """The folder of each role's initial weights: ``folder`` for ``model.path``."""
    roles, seed = roles_in_use(recipe), recipe.trainer.seed
    own = {r.name: resolve_model(r.path, seed=seed) for r in roles if r.path_key != "model.path"}
    return {role.name: own.get(role.name, folder) for role in roles}


def build_reward_model(recipe: Recipe, hf_config: Any, registry: GroupRegistry) -> Role:
    """Build the reward model of a recipe that has one. Collective.

    Args:
        recipe: the recipe.
        hf_config: Hugging Face config of the reward model.
        registry: process groups by layout.
    """
    section, world = recipe.reward_model, torch.distributed.get_world_size()
    assert section.path is not None, "the recipe has a reward model"
    spec = RoleSpec(
        name="reward_model",
        head="value",
        folder=resolve_model(section.path),
        dtype=DTYPES[section.dtype or recipe.model.dtype],
        megatron=section.megatron,
        batching=section.batching,
    )
    with phase("building reward_model"):
        return Role(spec, hf_config, registry.of(section.megatron.layout(world)))


class Roles:
    """Actor, and critic, reference and reward model where the recipe uses them.

    Args:
        recipe: the recipe.
        folder: Hugging Face folder or checkpoint with the actor's initial weights; also those of
            critic and reference unless the recipe names others.
        load_config: reads the Hugging Face config of a folder.
        registry: process groups by layout.
        total_steps: PPO steps of the run, for the learning-rate schedules.
        text: documents for the pretraining mix; None without one.
        table: who is where in which phase; None: as planned for this machine.

    Attributes:
        placement: moves the roles' parts between device and host memory.
        slot_balance: chooses the token budgets of the trained roles; None: the recipe has numbers.
        reward_scale: scale of the reward model's scores; None without a reward model.
        seconds: duration of each role's last forward pass and update.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        load_config,
        registry: GroupRegistry,
        total_steps: int,
        text: PretrainingMix | None = None,
        table: Residency | None = None,
    ) -> None:
        self.recipe, self.text = recipe, text
        world = torch.distributed.get_world_size()
        folders = _model_folders(recipe, folder)
        configs = {name: load_config(where) for name, where in folders.items()}
        dtype = DTYPES[recipe.model.dtype]
        # greedy sampling (temperature 0) defines no distribution: use the model's own
        temperature = recipe.rollout.temperature or 1.0

        def build(name, head, section, megatron, optim) -> Role:
            spec = RoleSpec(
                name=name,
                head=head,
                folder=folders[name],
                dtype=dtype,
                megatron=megatron,
                batching=section,
                temperature=temperature,
                optim=optim,
                total_steps=total_steps,
                router_replay=getattr(section, "router_replay", "off"),
                ema_decay=getattr(section, "ema_decay", None),
                value_head_init=recipe.critic.value_head_init,
                seed=recipe.trainer.seed,
            )
            with phase(f"building {name}"):
                return Role(spec, configs[name], registry.of(megatron.layout(world)))

        numbers = with_token_budgets(recipe, world, configs)
        actor, critic, ref = numbers.actor, numbers.critic, numbers.ref
        table = table or planned_residency(recipe, world, configs, own_gpu(recipe))
        self.placement = RolePlacement(table)
        self.actor = build("actor", "policy", actor, actor.megatron, actor.optim)
        self.placement.add(self.actor)
        self.critic: Role | None = None
        if recipe.algorithm.uses_critic:
            self.critic = build("critic", "value", critic, critic.megatron, critic.optim)
            self.placement.add(self.critic)
        self.ref: Role | None = None
        if recipe.uses_reference:
            batching = ref.batching(actor)
            self.ref = build("ref", "policy", batching, ref.megatron or actor.megatron, None)
            if recipe.needs_full_kl:
                bucket_bytes = recipe.rollout.sync_bucket_mb << 20
                self.actor.head.load_reference(self.ref.head, self.ref.weights, bucket_bytes)
            self.placement.add(self.ref)
        self.reward_model: Role | None = None
        self.reward_scale: RewardModelScale | None = None
        if recipe.reward_model.in_use:
            self._add_reward_model(configs["reward_model"], registry)
        self.flops = {
            name: model_flops(role.hf_config, role.spec.head) for name, role in self.trained.items()
        }
        given, self.slot_balance = given_budgets(recipe), None
        if None in given.values():
            costs = token_costs(recipe, world, configs)
            self.slot_balance = SlotBalance(given, costs, self.trained)
        self.seconds: dict[str, float] = {}
        self.skipped_steps = 0
        self.skipped_in_a_row: dict[str, int] = {}

    def _add_reward_model(self, hf_config: Any, registry: GroupRegistry) -> None:
        self.reward_model = build_reward_model(self.recipe, hf_config, registry)
        self.placement.add(self.reward_model)
        self.reward_scale = RewardModelScale(self.recipe.reward_model.normalize, hf_config)

    @property
    def trained(self) -> dict[str, Role]:
        """The trained roles by name, whose state a checkpoint holds."""
        roles = (self.actor, self.critic)
        return {role.name: role for role in roles if role is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a checkpoint besides models and optimizers."""
        return {
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": dict(self.skipped_in_a_row),
            "text": None if self.text is None else self.text.state_dict(),
            "reward_scale": None if self.reward_scale is None else self.reward_scale.state_dict(),
            "slot_balance": None if self.slot_balance is None else self.slot_balance.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        if self.text is not None and state.get("text"):
            self.text.load_state_dict(state["text"])
        if self.slot_balance is not None and state.get("slot_balance"):
            self.slot_balance.load_state_dict(state["slot_balance"])
        if self.reward_scale is not None:
            self.reward_scale.load_state_dict(state.get("reward_scale"))
        self.skipped_steps = int(state["skipped_steps"])
        in_a_row = state.get("skipped_in_a_row", {})
        self.skipped_in_a_row = {name: int(count) for name, count in in_a_row.items()}

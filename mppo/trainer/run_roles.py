"""The models of a run, and how each is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mppo.checkpoint.role_state import describe_model
from mppo.hub.builtin import resolve_model
from mppo.models.configuration import DTYPES
from mppo.models.role import Role
from mppo.parallel.groups import GroupRegistry
from mppo.planning.fit import own_gpu, planned_residency
from mppo.planning.flops import model_flops
from mppo.planning.residency import Residency
from mppo.planning.run_plan import token_costs, with_token_budgets
from mppo.planning.token_budgets import given_budgets
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.role_config import RoleConfig
from mppo.rewards.reward_model.model_scorer import RewardModelScale
from mppo.supervision.phase import phase
from mppo.trainer.pretraining_mix import PretrainingMix
from mppo.trainer.role_moves import RolePlacement
from mppo.trainer.update.slot_balance import SlotBalance
from mppo.trainer.value_gate import value_gate


def trained_models(recipe: Recipe, folder: Path, load_config) -> dict[str, dict[str, Any]]:
    """``describe_model`` of the trained roles, by name, without building them."""
    folders = _model_folders(recipe, folder)
    return {
        role.name: describe_model(
            load_config(folders[role.name]), role.head, DTYPES[role.dtype], role.value_bins
        )
        for role in recipe.roles()
        if role.trained
    }


def _model_folders(recipe: Recipe, folder: Path) -> dict[str, Path]:
    roles, seed = recipe.roles(), recipe.trainer.seed
    own = {r.name: resolve_model(r.path, seed=seed) for r in roles if r.path_key != "model.path"}
    return {role.name: own.get(role.name, folder) for role in roles}


def build_role(
    settings: RoleConfig,
    folder: Path,
    hf_config: Any,
    registry: GroupRegistry,
    total_steps: int = 1,
) -> Role:
    """Build a role. Collective."""
    groups = registry.of(settings.megatron.layout(torch.distributed.get_world_size()))
    with phase(f"building {settings.name}"):
        return Role(settings, folder, hf_config, groups, total_steps)


class Roles:
    """Actor, and critic, reference and reward model where the recipe uses them.

    ``folder``, a Hugging Face folder or checkpoint, has the initial weights of the actor, and of
    critic and reference unless the recipe names others; ``table`` says who is where in which phase
    (None: as planned for this machine). ``slot_balance`` chooses the token budgets of the trained
    roles, unless the recipe has numbers; ``gate`` is that of a value pretraining; ``seconds`` are
    durations of each role's last forward pass and update.
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
        self.recipe, self.text, self.gate = recipe, text, value_gate(recipe)
        world = torch.distributed.get_world_size()
        folders = _model_folders(recipe, folder)
        configs = {name: load_config(where) for name, where in folders.items()}
        numbers = with_token_budgets(recipe, world, configs)
        self.placement = RolePlacement(
            table or planned_residency(recipe, world, configs, own_gpu(recipe))
        )
        built: dict[str, Role] = {}
        for settings in numbers.roles():
            name = settings.name
            built[name] = build_role(settings, folders[name], configs[name], registry, total_steps)
            if name == "ref" and recipe.needs_full_kl:
                bucket_bytes = recipe.rollout.sync_bucket_mb << 20
                ref = built[name]
                built["actor"].head.load_reference(ref.head, ref.weights, bucket_bytes)
            self.placement.add(built[name])
        self.actor, self.critic = built["actor"], built.get("critic")
        self.ref, self.reward_model = built.get("ref"), built.get("reward_model")
        self.reward_scale: RewardModelScale | None = None
        if self.reward_model is not None:
            scale = recipe.reward_model.normalize
            self.reward_scale = RewardModelScale(scale, self.reward_model.hf_config)
        self.flops = {
            name: model_flops(role.hf_config, role.settings.head)
            for name, role in self.trained.items()
        }
        given, self.slot_balance = given_budgets(recipe), None
        if None in given.values():
            costs = token_costs(recipe, world, configs)
            self.slot_balance = SlotBalance(given, costs, self.trained)
        self.seconds: dict[str, float] = {}
        self.skipped_steps = 0
        self.skipped_in_a_row: dict[str, int] = {}

    @property
    def trained(self) -> dict[str, Role]:
        roles = (self.actor, self.critic)
        return {role.name: role for role in roles if role is not None and role.settings.trained}

    @property
    def exported(self) -> Role:
        """The role that is exported: the actor, in value pretraining the critic."""
        return self.trained[self.recipe.exported_role]

    def _parts(self) -> dict[str, Any]:
        """What has a state of its own; None: the recipe has no such part."""
        return {
            "text": None if self.text is None else self.text.documents,
            "reward_scale": self.reward_scale,
            "slot_balance": self.slot_balance,
            "gate": self.gate,
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": dict(self.skipped_in_a_row),
            **{
                name: None if part is None else part.state_dict()
                for name, part in self._parts().items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            if part is not None and state.get(name):
                part.load_state_dict(state[name])
        self.skipped_steps = int(state["skipped_steps"])
        in_a_row = state.get("skipped_in_a_row", {})
        self.skipped_in_a_row = {name: int(count) for name, count in in_a_row.items()}

"""What a search chooses: layout of actor and critic, micro-batches, and the servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mppo.recipe.schema import Recipe
from mppo.recipe.sections.roles import ActorConfig, CriticConfig

TrainedSection = ActorConfig | CriticConfig


@dataclass(frozen=True)
class RoleChoice:
    """The layout of a role, and its micro-batches.

    Args:
        tokens: token budget of a micro-batch per GPU; 0 of a frozen role, which keeps its own.
        recomputes: the backward pass repeats the forward pass.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    tokens: int = 4096
    recomputes: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.tp, self.pp, self.vpp, self.cp, self.ep, self.etp)

    def describe_role(self) -> list[str]:
        """Name the sizes larger than one, and the budget."""
        named = zip(("TP", "PP", "VPP", "CP", "EP", "ETP"), self.sizes)
        layout = " x ".join(f"{name}{size}" for name, size in named if size > 1) or "DP"
        tokens = [f"{self.tokens:,} tokens"] if self.tokens else []
        return [layout, *tokens, *(["recomputation"] if self.recomputes else [])]

    def layout(self, sparse: bool) -> dict[str, Any]:
        """Keys of ``megatron`` for the layout, which divides only experts that there are."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep if sparse else 1,
            "expert_tensor_parallel_size": self.etp if sparse else 1,
            "num_layers_in_first_pipeline_stage": None,
            "num_layers_in_last_pipeline_stage": None,
            "pipeline_layers": None,
        }

    def trained(self, section: TrainedSection, sparse: bool) -> TrainedSection:
        layout = {
            **self.layout(sparse),
            "recompute_granularity": "full" if self.recomputes else "none",
            "offload": "auto",
        }
        changes = {
            "megatron": section.megatron.model_copy(update=layout),
            "use_dynamic_bsz": True,
            "ppo_max_token_len_per_gpu": self.tokens,
        }
        return section.model_copy(update=changes)


@dataclass(frozen=True)
class LayoutChoice(RoleChoice):
    """A candidate: the choice of the actor, which is that of the critic unless it has its own.

    Args:
        server_ep: groups of a server's GPUs over which it divides its experts.
        apart: GPUs that only servers use; 0: as in the recipe.
        ahead: such servers generate the next step's batch while this one trains.
        sequential: one role is updated after the other, also where they could share a pipeline.
        own: roles with a choice of their own.
    """

    server: int = 1
    server_ep: int = 1
    apart: int = 0
    ahead: bool = False
    sequential: bool = False
    own: tuple[tuple[str, RoleChoice], ...] = ()

    def of(self, role: str) -> RoleChoice:
        return dict(self.own).get(role, self)

    @property
    def shared(self) -> bool:
        return self.of("critic").sizes == self.sizes

    def without_repeats(self) -> LayoutChoice:
        """The candidate without a choice of the critic's that is the actor's."""
        critic = self.of("critic")
        alike = (critic.sizes, critic.tokens, critic.recomputes) == (
            self.sizes, self.tokens, self.recomputes
        )  # fmt: skip
        own = tuple(one for one in self.own if one[0] != "critic" or not alike)
        return replace(self, own=own)

    def changed(self, role: str, **changes: Any) -> LayoutChoice:
        """The candidate with changes of one role's choice (arguments of ``RoleChoice``); a role
        without a choice of its own gets it. Those of the actor are also those of a critic without
        its own."""
        if role == "actor":
            return replace(self, **changes)
        before = self.of(role)
        fields = {field: getattr(before, field) for field in RoleChoice.__dataclass_fields__}
        return replace(
            self,
            own=tuple(sorted({**dict(self.own), role: RoleChoice(**fields | changes)}.items())),
        )

    def describe(self) -> str:
        """Name the choices of the roles, and the servers."""
        server = f"server TP{self.server}"
        if self.server_ep > 1:
            server += f" EP{self.server_ep}"
        parts = self.describe_role()
        parts += [f"{name} ({', '.join(choice.describe_role())})" for name, choice in self.own]
        parts += ["one role after the other"] if self.sequential else []
        parts += [f"{server} on {self.apart} GPUs of their own" if self.apart else server]
        parts += ["one step ahead"] if self.ahead else []
        return ", ".join(parts)

    def needs_as_much(self, other: LayoutChoice) -> bool:
        """Whether it surely needs at least as much memory as the other choice."""
        roles = ("actor", *(name for name, _ in self.own))
        return replace(self.without_batching(), ahead=False) == replace(
            other.without_batching(), ahead=False
        ) and all(
            self.of(role).tokens >= other.of(role).tokens
            and self.of(role).recomputes <= other.of(role).recomputes
            for role in roles
        )

    def without_batching(self) -> LayoutChoice:
        """The candidate's layouts alone, without micro-batches."""
        none: dict[str, Any] = {"tokens": 0, "recomputes": False}
        own = tuple((name, replace(choice, **none)) for name, choice in self.own)
        return replace(self, **none, own=own)

    def applied(self, recipe: Recipe, sparse: Mapping[str, bool], world: int) -> Recipe:
        sections: dict[str, Any] = {
            name: self.of(name).trained(getattr(recipe, name), sparse[name])
            for name in ("actor", "critic")
            if name in sparse
        }
        for name, choice in self.own:
            if name not in sections:
                section = getattr(recipe, name)
                megatron = section.megatron.model_copy(update=choice.layout(sparse[name]))
                sections[name] = section.model_copy(update={"megatron": megatron})
        trainer: dict[str, Any] = {"schedule": "sequential"} if self.sequential else {}
        rollout: dict[str, Any] = {}
        if recipe.rollout.name != "local":
            rollout = {
                "tensor_model_parallel_size": self.server,
                "expert_parallel_size": self.server_ep,
            }
        if self.apart:
            count = self.apart // self.server
            urls = tuple(f"http://rollout-{i}:30000" for i in range(count))
            rollout |= {"mode": "disaggregated", "sync": "distributed", "urls": urls,
                        "servers": None, "max_staleness": int(self.ahead)}  # fmt: skip
            trainer |= self._ranks(recipe, world)
        if self.ahead and recipe.algorithm.rollout_correction.rollout_is == "off":
            # samples of older weights have importance weights
            correction = recipe.algorithm.rollout_correction.model_copy(
                update={"rollout_is": "token"}
            )
            algorithm = {"rollout_correction": correction}
            sections["algorithm"] = recipe.algorithm.model_copy(update=algorithm)
        sections["trainer"] = recipe.trainer.model_copy(update=trainer)
        sections["rollout"] = recipe.rollout.model_copy(update=rollout)
        return recipe.model_copy(update=sections)

    def _ranks(self, recipe: Recipe, world: int) -> dict[str, int]:
        """Keys of ``trainer`` for the GPUs that the servers leave."""
        rest = world - self.apart
        each = min(rest, recipe.trainer.n_gpus_per_node or world)
        return {"nnodes": rest // each, "n_gpus_per_node": each}

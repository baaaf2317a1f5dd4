"""What a search chooses: layout of actor and critic, micro-batches, and the servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mppo.config.schema import Recipe
from mppo.config.sections.roles import ActorConfig, CriticConfig

TrainedSection = ActorConfig | CriticConfig


@dataclass(frozen=True)
class LayoutChoice:
    """A candidate.

    Args:
        tp, pp, vpp, cp, ep, etp: sizes of the layout of actor and critic.
        tokens: token budget of a micro-batch per GPU.
        recomputes: the backward pass repeats the forward pass.
        server: GPUs of a server.
        server_ep: groups of a server's GPUs over which it divides its experts.
        apart: GPUs that only servers use; 0: as in the recipe.
        ahead: such servers generate the next step's batch while this one trains.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    tokens: int = 4096
    recomputes: bool = False
    server: int = 1
    server_ep: int = 1
    apart: int = 0
    ahead: bool = False

    def describe(self) -> str:
        """Name the sizes larger than one, the budget, and the servers."""
        sizes = {"TP": self.tp, "PP": self.pp, "VPP": self.vpp, "CP": self.cp, "EP": self.ep,
                 "ETP": self.etp}  # fmt: skip
        layout = " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "DP"
        server = f"server TP{self.server}"
        if self.server_ep > 1:
            server += f" EP{self.server_ep}"
        parts = [layout, f"{self.tokens:,} tokens"]
        parts += ["recomputation"] if self.recomputes else []
        parts += [f"{server} on {self.apart} GPUs of their own" if self.apart else server]
        parts += ["one step ahead"] if self.ahead else []
        return ", ".join(parts)

    def needs_as_much(self, other: LayoutChoice) -> bool:
        """Whether it surely needs at least as much memory as the other choice."""
        alike = {"tokens": 0, "recomputes": False, "ahead": False}
        return (
            replace(self, **alike) == replace(other, **alike)
            and self.tokens >= other.tokens
            and self.recomputes <= other.recomputes
        )

    def applied(self, recipe: Recipe, sparse: Mapping[str, bool], world: int) -> Recipe:
        """The recipe with this choice.

        Args:
            recipe: the recipe.
            sparse: for each role, whether its model has experts.
            world: number of all GPUs.
        """
        sections: dict[str, Any] = {
            name: self._role(getattr(recipe, name), sparse[name])
            for name in ("actor", "critic")
            if name in sparse
        }
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
            sections["trainer"] = recipe.trainer.model_copy(update=self._ranks(recipe, world))
        if self.ahead and recipe.algorithm.rollout_correction.rollout_is == "off":
            # samples of older weights have importance weights
            correction = recipe.algorithm.rollout_correction.model_copy(
                update={"rollout_is": "token"}
            )
            algorithm = {"rollout_correction": correction}
            sections["algorithm"] = recipe.algorithm.model_copy(update=algorithm)
        sections["rollout"] = recipe.rollout.model_copy(update=rollout)
        return recipe.model_copy(update=sections)

    def _role(self, section: TrainedSection, sparse: bool) -> TrainedSection:
        layout = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep if sparse else 1,
            "expert_tensor_parallel_size": self.etp if sparse else 1,
            "num_layers_in_first_pipeline_stage": None,
            "num_layers_in_last_pipeline_stage": None,
            "pipeline_layers": None,
            "recompute_granularity": "full" if self.recomputes else "none",
            "offload": "auto",
        }
        changes = {
            "megatron": section.megatron.model_copy(update=layout),
            "use_dynamic_bsz": True,
            "ppo_max_token_len_per_gpu": self.tokens,
        }
        return section.model_copy(update=changes)

    def _ranks(self, recipe: Recipe, world: int) -> dict[str, int]:
        """Keys of ``trainer`` for the GPUs that the servers leave."""
        rest = world - self.apart
        each = min(rest, recipe.trainer.n_gpus_per_node or world)
        return {"nnodes": rest // each, "n_gpus_per_node": each}

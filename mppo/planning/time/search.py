"""Search for the layouts of a recipe with the shortest predicted step that fit the GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from mppo.config.checks import check_recipe
from mppo.config.gpu_types import GIB, GpuType
from mppo.config.schedule import schedule_kind
from mppo.config.schema import Recipe
from mppo.planning.fit import Fit, plan_fit
from mppo.planning.outside import TRAINER_CONTEXT
from mppo.planning.plan import plan_roles, with_token_budgets
from mppo.planning.time.kernels import Kernels
from mppo.planning.time.recipe import recipe_load
from mppo.planning.time.role_load import StepSequences
from mppo.planning.time.step import (
    Prediction,
    StepLoad,
    predict_generation,
    predict_step,
    predict_training,
)
from mppo.weights.shape import model_shape

SHOWN = 5
_TRIED = 40
"""Candidates, the fastest first, whose memory is planned."""
_SERVERS = 2
"""Widths of a server, those that generate fastest, which are tried with every layout."""
_SIZES = (1, 2, 4, 8)
_TOKENS = (4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class LayoutChoice:
    """What the search chooses: the layout of actor and critic, and the servers' width.

    Args:
        tp, pp, cp, ep: tensor, pipeline, context and expert size.
        tokens: token budget of a micro-batch per GPU.
        recomputes: the backward pass repeats the forward pass.
        server: GPUs of a server.
    """

    tp: int
    pp: int
    cp: int
    ep: int
    tokens: int
    recomputes: bool
    server: int

    def describe(self) -> str:
        """Name the sizes larger than one, the budget, and the servers."""
        sizes = {"TP": self.tp, "PP": self.pp, "CP": self.cp, "EP": self.ep}
        layout = " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "DP"
        text = f"{layout}, {self.tokens:,} tokens, server TP{self.server}"
        return f"{text}, recomputation" if self.recomputes else text

    def applied(self, recipe: Recipe, sparse: Mapping[str, bool]) -> Recipe:
        """The recipe with this choice.

        Args:
            recipe: the recipe.
            sparse: for each role, whether its model has experts.
        """
        sections: dict[str, Any] = {}
        for name in ("actor", "critic"):
            if name not in sparse:
                continue
            section = getattr(recipe, name)
            layout = {
                "tensor_model_parallel_size": self.tp,
                "pipeline_model_parallel_size": self.pp,
                "virtual_pipeline_model_parallel_size": None,
                "context_parallel_size": self.cp,
                "expert_model_parallel_size": self.ep if sparse[name] else 1,
                "expert_tensor_parallel_size": 1,
                "num_layers_in_first_pipeline_stage": None,
                "num_layers_in_last_pipeline_stage": None,
                "pipeline_layers": None,
                "recompute_granularity": "full" if self.recomputes else "none",
            }
            sections[name] = section.model_copy(
                update={
                    "megatron": section.megatron.model_copy(update=layout),
                    "use_dynamic_bsz": True,
                    "ppo_max_token_len_per_gpu": self.tokens,
                }
            )
        server = {"tensor_model_parallel_size": self.server, "expert_parallel_size": 1}
        if recipe.rollout.name == "local":
            server = {}
        sections["rollout"] = recipe.rollout.model_copy(update=server)
        return recipe.model_copy(update=sections)


@dataclass(frozen=True)
class PlannedLayout:
    """A candidate that was planned.

    Args:
        choice: the choice.
        recipe: the recipe with it.
        prediction: its predicted time.
        fit: its memory.
    """

    choice: LayoutChoice
    recipe: Recipe
    prediction: Prediction
    fit: Fit


class Search:
    """A search over layouts.

    Actor and critic have the same layout, so that they can share a pipeline; a reward model and
    other keys stay as they are.

    Args:
        recipe: a valid recipe.
        world: number of ranks.
        hf_configs: Hugging Face config object of each role's model, by role.
        gpu: the type of the GPU.
        sequences: the sequences of a step.
        kernels: the GPU's kernels.
    """

    def __init__(
        self,
        recipe: Recipe,
        world: int,
        hf_configs: Mapping[str, Any],
        gpu: GpuType,
        sequences: StepSequences,
        kernels: Kernels,
    ) -> None:
        self._recipe, self._world, self._configs, self._gpu = recipe, world, hf_configs, gpu
        self._sequences, self._kernels = sequences, kernels
        shapes = {name: model_shape(config) for name, config in hf_configs.items()}
        self._experts = shapes["actor"].num_experts
        self._sparse = {name: shape.num_experts > 0 for name, shape in shapes.items()}

    def best(self) -> list[PlannedLayout]:
        """The fastest candidates that fit, the fastest first; if none fits, the one that lacks the
        least memory."""
        found: list[PlannedLayout] = []
        least: PlannedLayout | None = None
        for _, choice in self._ranked()[:_TRIED]:
            one = self._planned(choice)
            if one.fit.verdict.fits:
                found.append(one)
            elif least is None or one.fit.verdict.over < least.fit.verdict.over:
                least = one
            if len(found) == SHOWN:
                break
        if found or least is None:
            return sorted(found, key=lambda one: one.prediction.seconds)
        return [least]

    def _ranked(self) -> list[tuple[float, LayoutChoice]]:
        """Seconds of the candidates that pass the recipe's rules, the fastest first; as if nothing
        were offloaded and the KV cache had room."""
        servers: dict[int, float] = {}
        ranked: list[tuple[float, LayoutChoice]] = []
        load: StepLoad | None = None
        for choice in self._layouts():
            load = self._load(choice)
            if load is None:
                continue
            if not servers:
                servers = self._generations(choice, load)
            # one role after the other: other schedules take seconds to make, and gain alike
            phases = predict_training(replace(load, schedule="sequential"), self._kernels)
            training = sum(phase.seconds for phase in phases)
            overlapped = load.overlapped
            ranked += [
                (
                    max(training, generation) if overlapped else training + generation,
                    replace(choice, server=tp),
                )
                for tp, generation in servers.items()
            ]
        return sorted(ranked, key=lambda one: one[0])

    def _generations(self, choice: LayoutChoice, load: StepLoad) -> dict[int, float]:
        """Seconds of generation by the width of a server."""
        found: dict[int, float] = {}
        for tp in self._server_sizes():
            trial = self._load(replace(choice, server=tp))
            if trial is not None:
                found[tp] = predict_generation(trial, self._kernels).seconds
        if not found:
            return {choice.server: predict_generation(load, self._kernels).seconds}
        return dict(sorted(found.items(), key=lambda one: one[1])[:_SERVERS])

    def _server_sizes(self) -> tuple[int, ...]:
        rollout = self._recipe.rollout
        if rollout.name == "local" or rollout.mode != "colocated":
            return (rollout.tensor_model_parallel_size,)
        return tuple(size for size in _SIZES if self._world % size == 0)

    def _layouts(self) -> Iterator[LayoutChoice]:
        """All layouts with the recipe's servers."""
        data, server = self._recipe.data, self._recipe.rollout.tensor_model_parallel_size
        longest = data.max_prompt_length + data.max_response_length
        experts = (1, 2, 4, 8, 16, 32) if self._experts else (1,)
        for tp, pp, cp, ep in product(_SIZES, _SIZES, (1, 2), experts):
            if self._world % (tp * pp * cp) or self._world % (ep * pp):
                continue
            if self._experts and self._experts % ep:
                continue
            # the least budget with a whole sequence, and the next one
            fitting = [tokens for tokens in _TOKENS if tokens * cp >= longest][:2]
            for tokens, recomputes in product(fitting, (False, True)):
                yield LayoutChoice(tp, pp, cp, ep, tokens, recomputes, server)

    def _load(self, choice: LayoutChoice) -> StepLoad | None:
        """What a step computes without offload; None if a rule refuses the choice, or
        what is trained at once is too large."""
        recipe = choice.applied(self._recipe, self._sparse)
        if check_recipe(recipe, self._world, self._configs):
            return None
        plans = plan_roles(recipe, self._world, self._configs)
        trained = [
            max(part.resident for part in plan.memory) for plan in plans if plan.mini_batches
        ]
        together = schedule_kind(recipe) != "sequential"
        if (sum(trained) if together else max(trained)) > self._gpu.nbytes - TRAINER_CONTEXT:
            return None
        return recipe_load(recipe, plans, None, self._configs, self._sequences)

    def _planned(self, choice: LayoutChoice) -> PlannedLayout:
        recipe = choice.applied(self._recipe, self._sparse)
        plans = plan_roles(recipe, self._world, self._configs)
        fit = plan_fit(recipe, plans, self._gpu)
        budgets = with_token_budgets(recipe, self._world, self._configs)
        load = recipe_load(budgets, plans, fit, self._configs, self._sequences)
        return PlannedLayout(choice, recipe, predict_step(load, self._kernels), fit)


def describe_search(found: list[PlannedLayout]) -> str:
    """Describe the best candidates, each with what takes its time."""
    lines = ["# layouts of actor and critic with the shortest predicted step"]
    for place, one in enumerate(found, 1):
        prediction, verdict = one.prediction, one.fit.verdict
        spare = -verdict.over / GIB
        room = f"{spare:.1f} GiB to spare" if verdict.fits else f"lacks {-spare:.1f} GiB"
        lines.append(
            f"{place}. {one.choice.describe()}: predicted {prediction.seconds:.1f} s, "
            f"{prediction.throughput:,.0f} tokens/s/GPU; {room}"
        )
        phases = ", ".join(
            f"{phase.name} {phase.seconds:.1f} s ({phase.bound})"
            for phase in prediction.phases
            if phase.seconds > 0.05 * prediction.seconds
        )
        lines.append(f"   {phases}")
    if not found:
        return "\n".join([*lines, "no layout of these GPUs passes the recipe's rules"])
    return "\n".join([*lines, f"predicted by formulas from {found[0].prediction.source}"])

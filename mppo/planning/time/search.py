"""Search for the layouts of a recipe with the shortest predicted step that fit the GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from mppo.config.checks import check_recipe
from mppo.config.gpu_types import GIB, GpuType
from mppo.config.schedule import schedule_kind
from mppo.config.schema import Recipe
from mppo.planning.fit import Fit, plan_fit
from mppo.planning.memory import experts_per_token, model_parameters
from mppo.planning.outside import TRAINER_CONTEXT, own_kv_tokens
from mppo.planning.plan import RolePlan, plan_roles, with_token_budgets
from mppo.planning.time.choice import LayoutChoice
from mppo.planning.time.generation import EnginePasses, Servers
from mppo.planning.time.kernels import Kernels
from mppo.planning.time.recipe import recipe_load, with_batching
from mppo.planning.time.role_load import StepSequences
from mppo.planning.time.step import Prediction, StepLoad, predict_step, predict_training
from mppo.planning.verdict import describe_verdict
from mppo.weights.shape import model_shape
from mppo.weights.table import parameter_table

SHOWN = 5
_TRIED = 200
"""Candidates, the fastest first, whose memory is planned."""
_REFINED = 24
"""Layouts, the fastest first, of which virtual stages and ETP are tried."""
_SERVERS = 2
"""Kinds of servers, those that generate fastest, which are tried with every layout."""
_SIZES = (1, 2, 4, 8)
_TOKENS = (4096, 8192, 16384, 32768)


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


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Args:
        best: the fastest candidates that fit, the fastest first; if none fits, the one that lacks
            the least memory; empty: none passes the recipe's rules.
        ahead: the fastest one that generates a step ahead, if it is faster than all of these.
        compared: number of candidates whose time was compared.
    """

    best: Sequence[PlannedLayout]
    ahead: PlannedLayout | None
    compared: int

    @property
    def recipe(self) -> Recipe | None:
        """The recipe with the fastest candidate that fits and trains on samples of the same
        weights; None: none fits."""
        fitting = [one.recipe for one in self.best if one.fit.verdict.fits]
        return fitting[0] if fitting else None


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
        kernels: the times of the GPU.
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
        self._most: float = gpu.nbytes - TRAINER_CONTEXT
        shapes = {name: model_shape(config) for name, config in hf_configs.items()}
        self._shape = shapes["actor"]
        self._parameters = model_parameters(parameter_table(self._shape))
        self._sparse = {name: shape.num_experts > 0 for name, shape in shapes.items()}

    def best(self) -> SearchResult:
        """Compare all candidates by formulas, and plan the fastest in full."""
        ranked = self._ranked()
        if not ranked:  # nothing can fit: look for what lacks the least
            self._most = math.inf
            ranked = [one for one in self._ranked() if one[1].recomputes]
        same = [choice for _, choice in ranked if not choice.ahead]
        found = self._fitting(same, SHOWN)
        ahead = self._fitting([choice for _, choice in ranked if choice.ahead], 1)
        faster = [
            one
            for one in ahead
            if one.fit.verdict.fits
            and found
            and one.prediction.seconds < found[0].prediction.seconds
        ]
        return SearchResult(found, faster[0] if faster else None, len(ranked))

    def _fitting(self, choices: Sequence[LayoutChoice], count: int) -> list[PlannedLayout]:
        """The first ones that fit; if none does, the one that lacks the least memory."""
        found: list[PlannedLayout] = []
        least: _Fitted | None = None
        failed: list[LayoutChoice] = []
        for choice in choices:
            if any(choice.needs_as_much(other) for other in failed):
                continue
            one = self._fitted(choice)
            if one.fit.verdict.fits:
                found.append(self._predicted(one))
            else:
                failed.append(choice)
                if least is None or one.fit.verdict.over < least.fit.verdict.over:
                    least = one
            if len(found) == count or len(failed) == _TRIED:
                break
        if found or least is None:
            return sorted(found, key=lambda one: one.prediction.seconds)
        return [self._predicted(least)]

    def _ranked(self) -> list[tuple[float, LayoutChoice]]:
        """Seconds of the candidates that pass the recipe's rules, the fastest first: by formulas,
        as if nothing were offloaded and the KV cache of colocated servers had room."""
        ranked: list[tuple[float, LayoutChoice]] = []
        for apart in self._splits():
            servers = self._generations(apart)
            if not servers:
                continue
            place = servers[0][1]
            ahead = apart > 0 and self._allowed(replace(place, ahead=True))
            plain = self._trained(self._layouts(place))
            fast = dict.fromkeys(replace(one, tokens=0, recomputes=False) for _, one in plain)
            finer = self._trained(finer for one in [*fast][:_REFINED] for finer in self._finer(one))
            for training, choice in [*plain, *finer]:
                for generation, server in servers:
                    one = replace(choice, server=server.server, server_ep=server.server_ep)
                    beside, after = max(training, generation), training + generation
                    ranked.append((beside if self._recipe.rollout.max_staleness else after, one))
                    ranked += [(beside, replace(one, ahead=True))] if ahead else []
        return sorted(ranked, key=lambda one: one[0])

    def _splits(self) -> list[int]:
        """GPUs that only servers use: none, a quarter, a half, as whole nodes."""
        rollout, node = self._recipe.rollout, self._recipe.trainer.n_gpus_per_node or self._world
        if rollout.name == "local" or rollout.mode != "colocated" or rollout.urls:
            return [0]
        shares = [self._world // 4, self._world // 2]
        whole = [
            gpus
            for gpus in dict.fromkeys(shares)
            if gpus and (self._world <= node or gpus % node == 0)
        ]
        return [0, *whole]

    def _generations(self, apart: int) -> list[tuple[float, LayoutChoice]]:
        """Seconds of generation with the fastest kinds of servers."""
        rollout = self._recipe.rollout
        given = LayoutChoice(
            server=rollout.tensor_model_parallel_size, server_ep=rollout.expert_parallel_size
        )
        if rollout.name == "local" or rollout.mode != "colocated":
            kinds = [given]
        else:
            gpus = apart or self._world
            kinds = [
                LayoutChoice(server=tp, server_ep=ep, apart=apart)
                for tp in _SIZES
                for ep in dict.fromkeys((1, tp if self._sparse["actor"] else 1))
                if gpus % tp == 0
            ]
        possible = [kind for kind in kinds if self._allowed(kind) and self._has_room(kind)]
        found = [(self._generation(kind), kind) for kind in possible]
        return sorted(found, key=lambda one: one[0])[:_SERVERS]

    def _allowed(self, kind: LayoutChoice) -> bool:
        """Whether the rules allow the servers."""
        trial = kind.applied(self._recipe, self._sparse, self._world)
        issues = check_recipe(trial, self._world - kind.apart, self._configs)
        return not any(issue.key.startswith(("rollout", "trainer.rollout")) for issue in issues)

    def _has_room(self, kind: LayoutChoice) -> bool:
        """Whether each server has room for its part of the weights and a sequence."""
        if not kind.apart:
            colocated = 2 * self._parameters / kind.server
            return self._recipe.rollout.name == "local" or colocated < self._most
        recipe, data = kind.applied(self._recipe, self._sparse, self._world), self._recipe.data
        room = own_kv_tokens(recipe, self._shape, self._parameters, self._gpu)
        return room > data.max_prompt_length + data.max_response_length

    def _generation(self, kind: LayoutChoice) -> float:
        recipe = kind.applied(self._recipe, self._sparse, self._world)
        rollout, room = recipe.rollout, None
        count = rollout.servers or max(1, self._world // kind.server)
        if rollout.urls:
            count = len(rollout.urls)
        if kind.apart:
            room = own_kv_tokens(recipe, self._shape, self._parameters, self._gpu)
        servers = Servers(count, kind.server, rollout.batch_size, room, kind.server_ep)
        active = experts_per_token(self._configs["actor"])
        engine = EnginePasses(self._kernels, self._shape, active, servers)
        return engine.generate(self._sequences).seconds

    def _layouts(self, place: LayoutChoice) -> Iterator[LayoutChoice]:
        """All layouts of the GPUs that the servers leave, without virtual stages and ETP."""
        world = self._world - place.apart
        experts = (1, 2, 4, 8, 16, 32) if self._sparse["actor"] else (1,)
        for tp, pp, cp, ep in product(_SIZES, _SIZES, (1, 2), experts):
            if world % (tp * pp * cp) or world % (ep * pp):
                continue
            if self._sparse["actor"] and self._shape.num_experts % ep:
                continue
            yield replace(place, tp=tp, pp=pp, cp=cp, ep=ep)

    def _finer(self, choice: LayoutChoice) -> Iterator[LayoutChoice]:
        """The layout with virtual stages, with experts divided by TP, and with both."""
        world = self._world - choice.apart
        each = self._shape.num_layers // choice.pp
        stages = [n for n in (1, 2, 4) if n == 1 or (choice.pp > 1 and each % n == 0)]
        experts = [1]
        if choice.tp > 1 and self._sparse["actor"]:
            experts += [choice.tp] if world % (choice.tp * choice.ep * choice.pp) == 0 else []
        for vpp, etp in product(stages, experts):
            if (vpp, etp) != (1, 1):
                yield replace(choice, vpp=vpp, etp=etp)

    def _trained(self, layouts: Iterator[LayoutChoice]) -> list[tuple[float, LayoutChoice]]:
        """Seconds of training by layout, tokens and recomputation, the fastest first."""
        longest = self._recipe.data.max_prompt_length + self._recipe.data.max_response_length
        found: list[tuple[float, LayoutChoice]] = []
        for layout in layouts:
            # the least budget with a whole sequence, and the next one
            fitting = [tokens for tokens in _TOKENS if tokens * layout.cp >= longest][:2]
            load = self._load(replace(layout, tokens=fitting[0])) if fitting else None
            if load is None:
                continue
            for tokens, recomputes in product(fitting, (False, True)):
                choice = replace(layout, tokens=tokens, recomputes=recomputes)
                recipe = choice.applied(self._recipe, self._sparse, self._world)
                phases = predict_training(with_batching(load, recipe), self._kernels, False)
                found.append((sum(phase.seconds for phase in phases), choice))
        return sorted(found, key=lambda one: one[0])

    def _load(self, choice: LayoutChoice) -> StepLoad | None:
        """What a step computes without offload; None if a rule refuses the choice, or
        what is trained at once is too large."""
        recipe, world = self._applied(choice)
        if check_recipe(recipe, world, self._configs):
            return None
        plans = plan_roles(recipe, world, self._configs)
        trained = [
            max(part.resident for part in plan.memory) for plan in plans if plan.mini_batches
        ]
        together = schedule_kind(recipe) != "sequential"
        if (sum(trained) if together else max(trained)) > self._most:
            return None
        return recipe_load(recipe, plans, None, self._configs, self._sequences)

    def _applied(self, choice: LayoutChoice) -> tuple[Recipe, int]:
        """The recipe with a choice, and its number of ranks."""
        recipe = choice.applied(self._recipe, self._sparse, self._world)
        return recipe, self._world - choice.apart

    def _fitted(self, choice: LayoutChoice) -> _Fitted:
        recipe, world = self._applied(choice)
        plans = plan_roles(recipe, world, self._configs)
        return _Fitted(choice, recipe, plans, plan_fit(recipe, plans, self._gpu))

    def _predicted(self, one: _Fitted) -> PlannedLayout:
        budgets = with_token_budgets(one.recipe, one.plans[0].layout.world, self._configs)
        load = recipe_load(budgets, one.plans, one.fit, self._configs, self._sequences)
        prediction = predict_step(load, self._kernels)
        return PlannedLayout(one.choice, one.recipe, prediction, one.fit)


@dataclass(frozen=True)
class _Fitted:
    """A candidate whose memory was planned."""

    choice: LayoutChoice
    recipe: Recipe
    plans: Sequence[RolePlan]
    fit: Fit


def describe_search(result: SearchResult) -> str:
    """Describe the best candidates, each with what takes its time."""
    lines = ["# layouts of actor and critic with the shortest predicted step"]
    if not result.best:
        return "\n".join([*lines, "no layout of these GPUs passes the recipe's rules"])
    first = result.best[0]
    for place, one in enumerate(result.best, 1):
        lines += [f"{place}. {_time(one)}", f"   {_why(one)}"]
    if result.ahead is not None:
        lines += [
            f"faster, on samples that are one update older: {_time(result.ahead)}",
            f"   {_why(result.ahead)}",
        ]
    if not first.fit.verdict.fits:
        lines += ["none fits; this one lacks the least:", describe_verdict(first.fit.verdict)]
    compared = f"{result.compared:,} candidates compared"
    return "\n".join([*lines, f"{compared}; predicted by formulas from {first.prediction.source}"])


def _time(one: PlannedLayout) -> str:
    prediction, verdict = one.prediction, one.fit.verdict
    spare = -verdict.over / GIB
    room = f"{spare:.1f} GiB to spare" if verdict.fits else "does not fit"
    return (
        f"{one.choice.describe()}: predicted {prediction.seconds:.1f} s, "
        f"{prediction.throughput:,.0f} tokens/s/GPU; {room}"
    )


def _why(one: PlannedLayout) -> str:
    """The longest phases with what binds them, waiting, and what is offloaded."""
    prediction = one.prediction
    parts = [
        f"{phase.name} {phase.seconds:.1f} s ({phase.bound})"
        for phase in prediction.phases
        if phase.seconds > 0.05 * prediction.seconds
    ]
    parts.append(f"GPUs wait for {sum(prediction.idle().values()):.0%}")
    leaving = [
        f"{name} {part}"
        for name, offload in one.fit.offload.items()
        for part, leaves in offload.model_dump().items()
        if leaves
    ]
    return ", ".join(parts) + (f"; offloaded: {', '.join(leaving)}" if leaving else "")

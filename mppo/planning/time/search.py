"""Search for the layouts of a recipe with the shortest predicted step that fit the GPUs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from mppo.planning.fit import Fit, plan_fit
from mppo.planning.memory import experts_per_token, model_parameters
from mppo.planning.outside import TRAINER_CONTEXT, own_kv_tokens
from mppo.planning.run_plan import RolePlan, plan_roles, with_token_budgets
from mppo.planning.time.choice import LayoutChoice, RoleChoice
from mppo.planning.time.generation_time import EnginePasses, Servers
from mppo.planning.time.kernels import Kernels
from mppo.planning.time.recipe import recipe_load, with_batching
from mppo.planning.time.role_load import StepSequences
from mppo.planning.time.step import Prediction, StepLoad, predict_step, predict_training
from mppo.planning.verdict import describe_verdict
from mppo.recipe.checks import check_recipe
from mppo.recipe.gpu_types import GIB, GpuType
from mppo.recipe.model_shape import model_shape
from mppo.recipe.schedule_kind import schedule_kind
from mppo.recipe.schema import Recipe
from mppo.weights.table import parameter_table

SHOWN = 5
_TRIED = 200
"""Candidates, the fastest first, whose memory is planned."""
_REFINED = 24
"""Layouts, the fastest first, of which virtual stages and ETP are tried."""
_STARTS = 2
"""Shared layouts, the fastest first, from which each role leaves for another one."""
_ROUNDS = 3
"""How often the critic or the actor leaves the fastest layouts so far."""
_OWN_REFINED = 4
"""Other layouts of a role, the fastest first, of which virtual stages and ETP are tried."""
_SERVERS = 2
"""Kinds of servers, those that generate fastest, which are tried with every layout."""
_SIZES = (1, 2, 4, 8)
_TOKENS = (4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class PlannedLayout:
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
        shared, own: seconds by formulas of the fastest one in which the critic has the actor's
            layout, and of the fastest one in which it has another; None: there is none.
    """

    best: Sequence[PlannedLayout]
    ahead: PlannedLayout | None
    compared: int
    shared: float | None = None
    own: float | None = None

    @property
    def recipe(self) -> Recipe | None:
        """The recipe with the fastest candidate that fits and trains on samples of the same
        weights; None: none fits."""
        fitting = [one.recipe for one in self.best if one.fit.verdict.fits]
        return fitting[0] if fitting else None


class Search:
    """A search over layouts.

    Actor and critic have the same layout, so that they can share a pipeline, and are also updated
    one after the other. With the fastest of these, each role in turn has other layouts, while the
    others keep theirs: the critic, the actor, and a reference or reward model with keys of its own.
    Other keys stay as they are.
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
        self._updates: dict[Hashable, list[tuple[float, float]]] = {}
        self._shapes, self._shape = shapes, shapes["actor"]
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
        by_critic = [
            min(
                (time for time, one in ranked if one.shared == shared and not one.ahead),
                default=None,
            )
            for shared in (True, False)
        ]
        return SearchResult(found, faster[0] if faster else None, len(ranked), *by_critic)

    def _fitting(self, choices: Sequence[LayoutChoice], count: int) -> list[PlannedLayout]:
        """The first ones that fit, of those with one actor the first one with its layout for the
        critic and the first one with another; if none fits, the one that lacks the least memory."""
        found: dict[tuple[LayoutChoice, bool], PlannedLayout] = {}
        least: _Fitted | None = None
        failed: list[LayoutChoice] = []
        for choice in choices:
            actor = replace(choice, own=()), choice.shared
            if actor in found or any(choice.needs_as_much(other) for other in failed):
                continue
            one = self._fitted(choice)
            if one.fit.verdict.fits:
                found[actor] = self._predicted(one)
            else:
                failed.append(choice)
                if least is None or one.fit.verdict.over < least.fit.verdict.over:
                    least = one
            if len(found) == count or len(failed) == _TRIED:
                break
        if found or least is None:
            return sorted(found.values(), key=lambda one: one.prediction.seconds)
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
            shared = self._varied(place, "actor", _REFINED)
            if "critic" in self._sparse and self._recipe.trainer.schedule == "auto":
                alone = self._varied(replace(place, sequential=True), "actor", _REFINED)
                shared = sorted([*shared, *alone], key=lambda one: one[0])
            for training, choice in [*shared, *self._unshared(place, shared)]:
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

    def _unshared(
        self, place: LayoutChoice, shared: Sequence[tuple[float, LayoutChoice]]
    ) -> Iterator[tuple[float, LayoutChoice]]:
        """Seconds of training of candidates in which not all roles have the actor's choice.

        From the fastest shared layouts, or else the recipe's own, the critic or the actor has all
        layouts while the other keeps its own; the same again from the fastest of these; then the
        frozen roles, one after the other.
        """
        by_layout: dict[LayoutChoice, LayoutChoice] = {}
        for _, choice in shared:
            by_layout.setdefault(choice.without_batching(), choice)
        starts = [*by_layout.values()][:_STARTS] or self._given(place)
        names = [role.name for role in self._recipe.roles() if role.key == f"{role.name}.megatron"]
        pair = [role for role in ("critic", "actor") if "critic" in names]
        found: dict[LayoutChoice, float] = {}
        tried: set[tuple[str, LayoutChoice]] = set()
        frozen = [[name] for name in names if name not in ("actor", "critic")]
        for roles in (*[pair] * _ROUNDS, *frozen):
            for start, role in product(starts, roles):
                explicit = start.changed("critic") if "critic" in names else start
                others = role, explicit.changed(role, **asdict(RoleChoice()))
                if others in tried:
                    continue
                tried.add(others)
                varied = self._varied(explicit, role, _OWN_REFINED)
                found |= {choice.without_repeats(): seconds for seconds, choice in varied}
            starts = sorted(found, key=lambda one: found[one])[:1] or starts
        return ((seconds, choice) for choice, seconds in found.items() if choice.own)

    def _given(self, place: LayoutChoice) -> list[LayoutChoice]:
        if place.apart:
            return []
        choice = place
        for role in self._recipe.roles():
            if role.trained:
                m, layout = role.megatron, role.megatron.layout(self._world)
                sizes = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "cp": layout.cp,
                         "ep": layout.ep, "etp": layout.etp}  # fmt: skip
                full, budgets = m.recompute_granularity == "full", self._budgets(layout.cp)
                for tokens in budgets[:1]:
                    choice = choice.changed(role.name, **sizes, tokens=tokens, recomputes=full)
        return [choice]

    def _budgets(self, cp: int) -> list[int]:
        """The least token budget of a micro-batch with a whole sequence, and the next one."""
        longest = self._recipe.data.max_prompt_length + self._recipe.data.max_response_length
        return [tokens for tokens in _TOKENS if tokens * cp >= longest][:2]

    def _varied(
        self, start: LayoutChoice, role: str, refined: int
    ) -> list[tuple[float, LayoutChoice]]:
        """Seconds of training with every layout of a role, the fastest first; of ``refined`` of
        them also with virtual stages and ETP."""
        plain = self._trained(self._layouts(start, role), role)
        plain.sort(key=lambda one: one[0])
        fast = dict.fromkeys(one.changed(role, tokens=0, recomputes=False) for _, one in plain)
        finer = (one for layout in [*fast][:refined] for one in self._finer(layout, role))
        return sorted([*plain, *self._trained(finer, role)], key=lambda one: one[0])

    def _layouts(self, start: LayoutChoice, role: str) -> Iterator[LayoutChoice]:
        """All layouts of a role on the servers' other GPUs, without virtual stages and ETP."""
        world, shape = self._world - start.apart, self._shapes[role]
        experts = (1, 2, 4, 8, 16, 32) if self._sparse[role] else (1,)
        for tp, pp, cp, ep in product(_SIZES, _SIZES, (1, 2), experts):
            if world % (tp * pp * cp) or world % (ep * pp):
                continue
            if self._sparse[role] and shape.num_experts % ep:
                continue
            yield start.changed(role, tp=tp, pp=pp, vpp=1, cp=cp, ep=ep, etp=1)

    def _finer(self, choice: LayoutChoice, role: str) -> Iterator[LayoutChoice]:
        world, own = self._world - choice.apart, choice.of(role)
        each = self._shapes[role].num_layers // own.pp
        stages = [n for n in (1, 2, 4) if n == 1 or (own.pp > 1 and each % n == 0)]
        experts = [1]
        if own.tp > 1 and self._sparse[role]:
            experts += [own.tp] if world % (own.tp * own.ep * own.pp) == 0 else []
        for vpp, etp in product(stages, experts):
            if (vpp, etp) != (1, 1):
                yield choice.changed(role, vpp=vpp, etp=etp)

    def _trained(
        self, layouts: Iterator[LayoutChoice], role: str
    ) -> list[tuple[float, LayoutChoice]]:
        """Seconds of training by layout of a role, its tokens and its recomputation, where an
        update has room."""
        frozen = role not in ("actor", "critic")
        found: list[tuple[float, LayoutChoice]] = []
        for layout in layouts:
            budgets = [0] if frozen else self._budgets(layout.of(role).cp)
            load = self._load(layout.changed(role, tokens=budgets[0])) if budgets else None
            if load is None:
                continue
            for tokens, recomputes in product(budgets, (False,) if frozen else (False, True)):
                choice = layout.changed(role, tokens=tokens, recomputes=recomputes)
                recipe, world = self._applied(choice)
                if self._needed(choice, recipe, world) > self._most:
                    continue
                phases = predict_training(with_batching(load, recipe), self._kernels, False)
                found.append((sum(phase.seconds for phase in phases), choice))
        return found

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
        frozen = [
            max(part.resident for part in plan.memory) for plan in plans if not plan.mini_batches
        ]
        together = schedule_kind(recipe) != "sequential"
        if max(sum(trained) if together else max(trained), *frozen, 0) > self._most:
            return None
        return recipe_load(recipe, plans, None, self._configs, self._sequences)

    def _needed(self, choice: LayoutChoice, recipe: Recipe, world: int) -> float:
        """Bytes that an update of a candidate needs at least: what does not compute is
        offloaded."""
        together = schedule_kind(recipe) != "sequential"
        keys: list[Hashable] = []
        for role in recipe.roles():
            if role.trained:
                own = choice.of(role.name)
                keys.append((role.name, together, world, own.sizes, own.tokens, own.recomputes))
        if any(key not in self._updates for key in keys):
            plans = plan_roles(recipe, world, self._configs)
            trained = (plan for plan in plans if plan.mini_batches)
            self._updates |= {key: _updates_by_stage(plan) for key, plan in zip(keys, trained)}
        roles = [self._updates[key] for key in keys]
        if together:
            return max(sum(one[0] for one in stage) + max(one[1] for one in stage)
                       for stage in zip(*roles))  # fmt: skip
        return max(sum(stage) for role in roles for stage in role)

    def _applied(self, choice: LayoutChoice) -> tuple[Recipe, int]:
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


def _updates_by_stage(plan: RolePlan) -> list[tuple[float, float]]:
    """Bytes that a role holds in its update, and those that its passes allocate at least."""
    return [
        (
            memory.resident,
            passes.update
            + passes.kept
            * (min(passes.in_flight, passes.micro_batches * passes.mini_batches) - passes.chunk),
        )
        for memory, passes in zip(plan.memory, plan.passes)
    ]


@dataclass(frozen=True)
class _Fitted:
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
    if result.own is not None:
        lines.append(_unshared(result.own, result.shared))
    compared = f"{result.compared:,} candidates compared"
    return "\n".join([*lines, f"{compared}; predicted by formulas from {first.prediction.source}"])


def _unshared(own: float, shared: float | None) -> str:
    if shared is None:
        return "no layout that actor and critic could share passes the recipe's rules"
    return (
        "without copies of offloaded parts: the fastest with another layout for the critic "
        f"{own:.1f} s, with the same for both {shared:.1f} s"
    )


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

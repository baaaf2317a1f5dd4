"""The quick mode: a rank's result from two smaller runs, scaled to the recipe's size.

Memory and counts of a rank are linear in the layers per pipeline chunk, if a chunk has at least a
mixture's first dense layers, one period of alternating attention windows, and a layer between the
model's first and last one. Two runs of different depths give the line. Operations, waits and
communication of a phase are scaled by the number of micro-batches. Peaks do not depend on that
number once the pipeline is full.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mppo.planning.memory import role_stage_layers
from mppo.recipe.model_shape import model_shape
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.role_config import RoleConfig
from mppo_simulate.case import RankCase
from mppo_simulate.gpu.counters import Collective
from mppo_simulate.rank import PhaseResult, RankResult

K = TypeVar("K")


@dataclass(frozen=True)
class Depths:
    """Layers of each pipeline chunk in the two runs, and in the recipe.

    Args:
        first: layers per chunk in the shallow run.
        second: layers per chunk in the deep run.
        full: layers per chunk of the simulated rank in the recipe, by role.
    """

    first: int
    second: int
    full: Mapping[str, float]


def quick_result(case: RankCase, run: Callable[[RankCase], RankResult]) -> RankResult:
    """Estimate the result of ``case`` from runs with fewer layers and micro-batches.

    Args:
        case: the rank to simulate.
        run: simulates one case.
    """
    recipe = reduced_batch(case.recipe, case.world_size)
    fewer = replace(case, recipe=recipe)
    depths = chunk_depths(case)
    if depths is None:
        return scale_micro_batches(run(fewer), case.recipe, recipe)
    shallow, deep = (run(with_layers(fewer, n)) for n in (depths.first, depths.second))
    bucket = recipe.rollout.sync_bucket_mb << 20
    return scale_micro_batches(extrapolated(shallow, deep, depths, bucket), case.recipe, recipe)


def chunk_depths(case: RankCase) -> Depths | None:
    """Choose the depths of the two runs; None if the rank's chunks are not deeper than those."""
    full, between = {}, 2
    for role in case.recipe.roles():
        shape = model_shape(case.hf_configs[role.name])
        layout = role.megatron.layout(case.world_size)
        owned = role_stage_layers(role, shape.num_layers, case.world_size)
        stage = layout.coordinates(case.rank).pp
        full[role.name] = len(owned[stage]) / layout.vpp
        if layout.pp * layout.vpp == 1:
            between = 3
    period = _longest_period(case)
    first = max(fewest_layers(case), period * math.ceil(between / period))
    second = first + period
    if min(full.values()) <= second:
        return None
    return Depths(first, second, full)


def fewest_layers(case: RankCase) -> int:
    """The fewest layers per pipeline chunk among which is every kind of layer, at least two."""
    shapes = [model_shape(case.hf_configs[role.name]) for role in case.recipe.roles()]
    dense = max(s.sparse_layers.index(True) if any(s.sparse_layers) else 0 for s in shapes)
    period = _longest_period(case)
    return max(2, period * math.ceil((dense + 1) / period))


def _longest_period(case: RankCase) -> int:
    return max(_period(case.hf_configs[role.name]) for role in case.recipe.roles())


def _period(hf_config: Any) -> int:
    """Number of layers after which the kinds of attention repeat."""
    kinds = getattr(hf_config, "layer_types", None) or ["full_attention"]
    return next(n for n in range(1, len(kinds) + 1) if kinds[n:] == kinds[: len(kinds) - n])


def with_layers(case: RankCase, layers: int) -> RankCase:
    """Return the case with ``layers`` layers in every pipeline chunk of every role."""
    configs, recipe = {}, case.recipe
    for role in case.recipe.roles():
        layout = role.megatron.layout(case.world_size)
        config = copy.deepcopy(case.hf_configs[role.name])
        config.num_hidden_layers = layers * layout.pp * layout.vpp
        if getattr(config, "layer_types", None):
            period = _period(config)
            kinds = config.layer_types[:period] * config.num_hidden_layers
            config.layer_types = kinds[: config.num_hidden_layers]
        configs[role.name] = config
    even = dict(
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        pipeline_layers=None,
    )
    for name in ("actor", "critic", "ref", "reward_model"):
        section = getattr(recipe, name)
        if section.megatron is not None:
            changed = section.model_copy(
                update={"megatron": section.megatron.model_copy(update=even)}
            )
            recipe = recipe.model_copy(update={name: changed})
    return replace(case, recipe=recipe, hf_configs=configs)


def reduced_batch(recipe: Recipe, world_size: int) -> Recipe:
    """Return the recipe with one mini-batch that is just large enough to fill every pipeline."""
    longest = recipe.data.max_prompt_length + recipe.data.max_response_length
    multiple, least = recipe.rollout.n, 1
    for role in recipe.roles():
        layout = role.megatron.layout(world_size)
        # at least two, to distinguish events per micro-batch from events per mini-batch
        passes = max(2, layout.pp * (2 if layout.vpp > 1 else 1) + (layout.pp > 1))
        passes = math.ceil(passes / layout.pp) * layout.pp if layout.vpp > 1 else passes
        for size in _micro_batch_sizes(role, layout.cp, longest + role.end_slots):
            multiple = math.lcm(multiple, layout.dp * size)
            least = max(least, passes * layout.dp * size)
    full = recipe.actor.ppo_mini_batch_size * recipe.rollout.n
    sequences = multiple * math.ceil(least / multiple)
    if sequences >= full:
        sequences = full
    prompts = sequences // recipe.rollout.n
    sections: dict[str, Any] = {
        name: getattr(recipe, name).model_copy(
            update={"ppo_mini_batch_size": prompts, "ppo_epochs": 1}
        )
        for name in ("actor", "critic")
    }
    data = recipe.data.model_copy(update={"train_batch_size": prompts})
    return recipe.model_copy(update={**sections, "data": data})


def _micro_batch_sizes(role: RoleConfig, cp: int, longest: int) -> set[int]:
    """Numbers of sequences per micro-batch, in training and in forward-only passes."""
    b = role.batching
    if b.use_dynamic_bsz:
        budgets = (b.token_budget, b.log_prob_max_token_len_per_gpu)
        return {max(1, budget * cp // longest) for budget in budgets if budget}
    sizes = (b.ppo_micro_batch_size_per_gpu, b.log_prob_micro_batch_size_per_gpu)
    return {size for size in sizes if size}


def extrapolated(
    shallow: RankResult, deep: RankResult, depths: Depths, bucket_bytes: int = 0
) -> RankResult:
    """Extrapolate two results linearly to the recipe's depth.

    The bytes of a weight sync's buckets do not grow, unless the weights fit one bucket.
    """
    names = {
        name: (full - depths.first) / (depths.second - depths.first)
        for name, full in depths.full.items()
    }

    def factor(text: str) -> float:
        """Position on the line for the role in the text: 0 is ``shallow``, 1 is ``deep``."""
        words = text.replace(",", "").split()
        if words[0] == "weight":  # a weight sync sends the actor
            return names["actor"]
        return next((by for name, by in names.items() if name in words), max(names.values()))

    def line(a: Counter[K], b: Counter[K], by: Callable[[K], float]) -> Counter[K]:
        found: Counter[K] = Counter()
        for key in a | b:
            found[key] = round(a[key] + (b[key] - a[key]) * by(key))
        return found

    def between_passes(a: Counter[str], b: Counter[str]) -> Counter[str]:
        return line(a, b, lambda text: names.get(text.split()[0], factor(text)))

    resident = between_passes(shallow.resident, deep.resident)
    # permanent purposes: their bytes never exceed those between passes
    complete = between_passes(shallow.complete, deep.complete)
    lasting = complete.keys() - {phase.name for phase in deep.phases}
    sizes = names | ({"weight": 1.0} if complete["actor weights"] > bucket_bytes else {})
    phases = []
    # the schedule, and with it the order of the roles' first passes, may depend on the depth
    order = {phase.name: number for number, phase in reversed(list(enumerate(deep.phases)))}
    pairs = (
        sorted(result.phases, key=lambda phase: order[phase.name]) for result in (shallow, deep)
    )
    for one, two in zip(*pairs, strict=True):
        at = factor(one.name)
        peaks = [
            (line(a, b, lambda text, at=at: sizes.get(text.split()[0], at)), source)
            for a, b, source in _moments(one, two)
        ]
        for found, _ in peaks:
            for purpose in found.keys() & lasting:
                found[purpose] = min(found[purpose], complete[purpose])
        composition, source = max(peaks, key=lambda found: found[0].total())
        phases.append(
            PhaseResult(
                name=one.name,
                peak=composition.total(),
                composition=composition,
                moment=two.moment,
                line=source,
                operations=one.operations + (two.operations - one.operations) * at,
                micro_batches=two.micro_batches,
                waits=line(one.waits, two.waits, lambda key, at=at: at),
                calls=line(one.calls, two.calls, lambda key, at=at: at),
                nbytes=line(one.nbytes, two.nbytes, lambda key, at=at: at),
            )
        )
    found = replace(deep, phases=phases, seconds=shallow.seconds + deep.seconds)
    pinned = line(shallow.pinned, deep.pinned, lambda name: names[name])
    return replace(found, resident=resident, complete=complete, pinned=pinned)


def _moments(one: PhaseResult, two: PhaseResult) -> list[tuple[Counter[str], Counter[str], str]]:
    """Compositions in both results, and the source line, of moments that may be the peak at
    another depth."""
    found = [(one.composition, two.composition, two.line)]
    if one.name.startswith("building") and one.line == two.line:
        return found  # memory only grows: the last line has the peak at any depth
    both = one.by_line.keys() & two.by_line.keys()
    others = [(one.by_line[source], two.by_line[source], source) for source in both]
    return found + others if one.line == two.line else others or found


def scale_micro_batches(result: RankResult, recipe: Recipe, reduced: Recipe) -> RankResult:
    """Scale the counts of a run with fewer sequences to a step of the recipe.

    A count that is a multiple of the number of micro-batches is scaled with that number. Other
    counts are per mini-batch in updates, and per step elsewhere; so are Megatron's exchanges of
    gradients and parameters, of which any number of buckets may be such a multiple.
    """
    mini_batches = -(-recipe.data.train_batch_size // recipe.actor.ppo_mini_batch_size)
    share = recipe.data.train_batch_size / reduced.data.train_batch_size
    phases = []
    for phase in result.phases:
        count = phase.micro_batches

        def is_per_micro(key: object, number: int, count: float = count) -> bool:
            return bool(count) and number % count == 0 and not _is_of_buckets(key)

        def scale(
            counts: Counter[K],
            per_mini: int,
            is_per_micro: Callable[[object, int], bool] = is_per_micro,
        ) -> Counter[K]:
            return Counter(
                {
                    key: round(number * (share if is_per_micro(key, number) else per_mini))
                    for key, number in counts.items()
                }
            )

        per_mini = mini_batches if phase.name.startswith(("updating", "stepping")) else 1
        calls = scale(phase.calls, per_mini)
        nbytes = Counter(
            {key: round(n * calls[key] / phase.calls[key]) for key, n in phase.nbytes.items()}
        )
        phases.append(
            replace(
                phase,
                operations=phase.operations * (share if count else per_mini),
                micro_batches=count * share,
                waits=scale(phase.waits, per_mini),
                calls=calls,
                nbytes=nbytes,
            )
        )
    return replace(result, phases=phases)


def _is_of_buckets(key: object) -> bool:
    """Whether a count is of collectives over Megatron's buckets of gradients or parameters."""
    return isinstance(key, Collective) and key.operation.endswith("_coalesced")

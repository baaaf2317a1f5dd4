"""All metrics of a step, under verl's names, and TRL's where it has its own for the same number.

A number has one name here; ``docs/migrating.md`` lists TRL's aliases.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil
import torch
from torch import Tensor

from mppo import register
from mppo.algos import rollout_correction
from mppo.algos.masked import Moments, merged_moments, sequence_moments, sequence_sum
from mppo.batch.batch import Batch, EpisodeIndex
from mppo.batch.episode import NO_WEIGHTS, Episode
from mppo.batch.gathers import gather_of, gather_table
from mppo.batch.outputs import Experience, Outputs
from mppo.parallel import device
from mppo.parallel.collectives import all_gather_objects, group_size
from mppo.parallel.exchange import sum_over_ranks
from mppo.parallel.partition import partition
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.roles import ActorConfig
from mppo.report.history import MEMORY, OF_RANKS, PROBE
from mppo.rewards.scores import UNSCORED
from mppo.safety.input_error import InputError
from mppo.trainer.advantages import value_states
from mppo.trainer.batch_selection import informative_sequences

GROUPS = 10
CELLS = 1000
"""Equal cells of the range of values, in which tokens are counted before they are grouped."""
VALUE, RETURN, ERROR = (
    "critic/calibration/value/", "critic/calibration/return/", "critic/calibration/error",
)  # fmt: skip
"""Metrics: mean value and mean return of each group (``value/0`` is of the lowest values), and the
mean over tokens of the distance between the two."""
BY_AGE = "critic/vf_explained_var_by_age/"
"""Prefix of the metrics; an age in updates follows."""
_ROUNDING = 1e-5
"""Share of the largest return or error within which returns count as equal."""
_ALL_RANKS, _HIGHEST = 32, 8
"""Most ranks that have metrics of their own each, and how many have them where there are more."""


def batch_metrics(
    scored: Batch, outputs: Outputs, experience: Experience, step: int, recipe: Recipe
) -> dict[str, float]:
    """All metrics of a step's data before the update; a dump has what they need. InputError: a
    plugin's metric is no number, or has the name of another. Collective."""
    data = StepData(scored, outputs, experience, step, recipe)
    metrics: dict[str, float] = {}
    for name, compute in register.metric.items():
        found = compute(data)
        own = name in register.metric.own
        metrics |= found if own else {name: plugin_number(name, found, metrics)}
    return metrics


def plugin_number(name: str, found: Any, metrics: Mapping[str, float]) -> float:
    """The value of a plugin's metric, a number or a tensor of one; InputError if it is something
    else, or ``metrics`` has one of its name."""
    if name in metrics:
        raise InputError(f"mppo, too, has the metric {name!r}; register yours by another name")
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError) as error:
        why = f"returned a value of type {type(found).__name__}: {error}"
        raise InputError(f"the metric {name!r} {why}; return one number") from error


@dataclass(frozen=True)
class StepData:
    """What the metrics of a step are computed from. Tensors ``[B]`` are of all sequences, those
    ``[T]`` of the sequences held here; ``gather_of`` brings numbers per sequence together."""

    scored: Batch
    outputs: Outputs
    experience: Experience
    step: int
    recipe: Recipe


Metric = Callable[[StepData], Any]
"""A plugin's metric returns one number, those of mppo return several by name. Every rank calls it,
and the first rank logs its value."""


def experience_metrics(experience: Experience, gae_unit: str = "token") -> dict[str, float]:
    """Scores, rewards, advantages, returns, values, lengths, mismatch and objective. Collective.

    ``critic/score/*`` are over episodes, ``critic/rewards/*`` over sequences (a sequence's reward
    is the sum of its tokens'), ``critic/advantages|returns|values/*`` over response tokens.
    ``critic/vf_explained_var`` is ``1 - var(returns - values) / var(returns)``, and
    ``critic/vf_explained_var_by_episode`` the same with one weight for each episode, which its
    tokens share; absent if all returns are equal.
    ``objective/kl`` and ``objective/entropy`` are sums over a response's tokens of
    ``log pi - log pi_ref`` and ``-log pi``, averaged over episodes; ``objective/rlhf_reward`` is
    ``objective/scores + objective/non_score_reward``. With ``gae_unit`` ``turn``, returns and
    values are those of the first tokens of turns. All are finite, even without response tokens.
    """
    outputs = experience.old
    batch, episodes = outputs.batch, outputs.batch.episodes
    scores_E = batch.scores_B[episodes.last_E]
    table = gather_table(gather_of(batch), _statistics(experience, gae_unit))
    length_B, reward_B = batch.response_B.double(), table["rewards"]
    moments = {name: merged_moments(x) for name, x in table.items() if x.dim() == 2}
    metrics: dict[str, float] = {}
    per_sequence = {
        "critic/score": scores_E,
        "critic/rewards": reward_B,
        "response_length": length_B,
        "prompt_length": batch.prompt_B,
    }
    for name, values in per_sequence.items():
        metrics |= _mean_max_min(name, values)
    for name in ("advantages", "returns", "values"):
        each = moments[name]
        largest, smallest = (each.max, each.min) if each.count else (0.0, 0.0)
        metrics |= {f"critic/{name}/mean": each.mean}
        metrics |= {f"critic/{name}/max": largest, f"critic/{name}/min": smallest}
    metrics |= _explained(table["errors"], table["returns"], episodes)
    present_B = length_B > 0
    metrics["response_length/clip_ratio"] = _mean(batch.truncated_B)
    metrics |= _mean_max_min("response_length_non_aborted", length_B[present_B])
    metrics["response_length_non_aborted/clip_ratio"] = _mean(batch.truncated_B[present_B])
    metrics["response/aborted_ratio"] = _mean(~present_B)
    if outputs.has_actor_logprobs:
        correction = {name: table[name] for name in rollout_correction.STATISTICS}
        metrics |= rollout_correction.correction_metrics(correction)
    masked_fraction = table["zero_weights"].sum().item() / max(length_B.sum().item(), 1.0)
    metrics |= rollout_correction.weight_metrics(moments["weights"], masked_fraction)
    non_score_B = torch.where(present_B, reward_B - batch.scores_B, 0.0)
    non_score_E = episodes.sum(non_score_B)
    metrics["objective/kl"] = _mean(episodes.sum(table["kl"]))
    metrics["objective/entropy"] = _mean(episodes.sum(table["surprisal"]))
    metrics["objective/non_score_reward"] = _mean(non_score_E)
    metrics["objective/scores"] = _mean(scores_E)
    metrics["objective/rlhf_reward"] = _mean(scores_E + non_score_E)
    metrics["val/num_eos_tokens"] = float((~batch.truncated_B & present_B).sum())
    return metrics


def _statistics(experience: Experience, gae_unit: str) -> dict[str, Tensor]:
    """What ``experience_metrics`` needs of each sequence held: sums and moments over its tokens."""
    outputs, weight_T = experience.old, experience.loss_weight_T
    batch = outputs.batch
    mask_T, cu_seqlens = batch.response_mask_T, batch.cu_seqlens
    inside_T = mask_T > 0
    tokens = {"advantages": experience.advantages_T, "weights": weight_T}
    states = {
        "returns": experience.returns_T,
        "values": outputs.values_T,
        "errors": experience.returns_T - outputs.values_T,
    }
    states_T = value_states(batch, gae_unit) * mask_T
    sums = {
        "rewards": experience.rewards_T,
        "kl": torch.where(inside_T, outputs.logprobs_T - outputs.ref_logprobs_T, 0.0),
        "surprisal": torch.where(inside_T, -outputs.logprobs_T, 0.0),
        "zero_weights": (inside_T & (weight_T == 0)).to(mask_T.dtype),
    }
    table = {name: sequence_moments(x_T, mask_T, cu_seqlens) for name, x_T in tokens.items()}
    table |= {name: sequence_moments(x_T, states_T, cu_seqlens) for name, x_T in states.items()}
    table |= {name: sequence_sum(x_T, cu_seqlens) for name, x_T in sums.items()}
    if outputs.has_actor_logprobs:
        table |= rollout_correction.correction_statistics(
            outputs.logprobs_T, batch.rollout_logprobs_T, mask_T, cu_seqlens
        )
    return table


def _explained(errors_B: Tensor, returns_B: Tensor, episodes: EpisodeIndex) -> dict[str, float]:
    """Explained variance with equal weights of tokens, and of episodes, from moments ``[B, 5]``; {}
    where it is undefined."""
    tokens_E = episodes.sum(returns_B[:, 0])
    weights: dict[str, Tensor | None] = {
        "critic/vf_explained_var": None,
        "critic/vf_explained_var_by_episode": 1.0 / tokens_E.clamp(min=1.0)[episodes.of_B],
    }
    found: dict[str, float] = {}
    for name, weight_B in weights.items():
        errors, returns = (merged_moments(x_B, weight_B) for x_B in (errors_B, returns_B))
        explained = explained_variance(errors, returns)
        if explained is not None:
            found[name] = explained
    return found


def explained_variance(errors: Moments, returns: Moments) -> float | None:
    """``1 - var(returns - values) / (var(returns) + 1e-5)`` over the masked tokens (verl). None
    where it is undefined: there are fewer than two returns, or all are equal but for rounding
    (returns are computed as advantages plus values, in float32)."""
    largest = max(abs(x) for each in (returns, errors) for x in (each.max, each.min))
    if returns.count < 2 or returns.max - returns.min <= _ROUNDING * largest:
        return None
    return 1.0 - errors.var() / (returns.var() + 1e-5)


def _mean(x: Tensor) -> float:
    return x.double().mean().item() if len(x) else 0.0


def _mean_max_min(name: str, x: Tensor) -> dict[str, float]:
    """``name/mean``, ``name/max``, ``name/min``; zeros for an empty tensor."""
    if len(x) == 0:
        x = torch.zeros(1)
    ends = {f"{name}/max": x.max().item(), f"{name}/min": x.min().item()}
    return {f"{name}/mean": _mean(x), **ends}


def calibration(experience: Experience, gae_unit: str) -> dict[str, float]:
    """``critic/calibration/*``: mean value and mean return of each tenth of the tokens that have a
    value, in order of their values. Collective. Equal values are in one group, so that groups may
    be empty: those have no metrics."""
    old, batch = experience.old, experience.old.batch
    states_T = value_states(batch, gae_unit) * batch.response_mask_T
    moments_H = sequence_moments(old.values_T, states_T, batch.cu_seqlens)
    of_values = merged_moments(gather_of(batch).sequences(moments_H))
    if not of_values.count:
        return {}
    inside_T = states_T > 0
    values_N = old.values_T[inside_T].double()
    returns_N = experience.returns_T[inside_T].double()
    width = max(of_values.max - of_values.min, torch.finfo(torch.float32).tiny) / CELLS
    cell_N = ((values_N - of_values.min) / width).long().clamp(0, CELLS - 1)
    sums = torch.zeros(3, CELLS, dtype=torch.float64)
    for row, x_N in zip(sums, (torch.ones_like(values_N), values_N, returns_N)):
        row.index_add_(0, cell_N, x_N)
    if not batch.is_replicated and group_size() > 1:
        sum_over_ranks(sums)
    count = sums[0]
    middle = (count.cumsum(0) - count / 2) / count.sum()
    group = (GROUPS * middle).long().clamp(max=GROUPS - 1)
    grouped = torch.zeros(3, GROUPS, dtype=torch.float64).index_add_(1, group, sums)
    metrics: dict[str, float] = {}
    error = 0.0
    for number, (tokens, value, target) in enumerate(grouped.T.tolist()):
        if tokens:
            metrics[f"{VALUE}{number}"] = value / tokens
            metrics[f"{RETURN}{number}"] = target / tokens
            error += abs(target - value)
    return metrics | {ERROR: error / count.sum().item()}


def explained_by_age(experience: Experience, step: int, recipe: Recipe) -> dict[str, float]:
    """``critic/vf_explained_var_by_age/K``: of the tokens that were K updates old; weights of
    version ``step - 1`` are of age 0. Collective. Only of a batch with tokens of several ages, and
    absent for an age whose returns are all equal."""
    ages = range(recipe.rollout.max_staleness + 1)
    if not recipe.algorithm.uses_critic or len(ages) == 1:
        return {}
    old, returns_T, batch = experience.old, experience.returns_T, experience.old.batch
    states_T = value_states(batch, recipe.algorithm.gae_unit) * batch.response_mask_T
    tokens, table = {"errors": returns_T - old.values_T, "returns": returns_T}, {}
    for age in ages:
        of_age_T = states_T * (batch.weight_version_T == step - 1 - age)
        for name, x_T in tokens.items():
            table[f"{name} {age}"] = sequence_moments(x_T, of_age_T, batch.cu_seqlens)
    rows = {name: merged_moments(x) for name, x in gather_table(gather_of(batch), table).items()}
    present = [age for age in ages if rows[f"returns {age}"].count]
    metrics = {}
    for age in present if len(present) > 1 else ():
        share = explained_variance(rows[f"errors {age}"], rows[f"returns {age}"])
        if share is not None:
            metrics[f"{BY_AGE}{age}"] = share
    return metrics


def mismatch_metrics(outputs: Outputs, step: int) -> dict[str, float]:
    """Gap between engine and actor over response tokens: log-probabilities, if the actor computed
    them, and weight versions. Collective."""
    batch = outputs.batch
    mask_T, cu_seqlens = batch.response_mask_T, batch.cu_seqlens
    if not batch.response_B.any():
        return {}
    gap_T = (outputs.logprobs_T - batch.rollout_logprobs_T).abs()
    tokens = {"lag": (step - 1 - batch.weight_version_T).float(), "gap": gap_T}
    table = {name: sequence_moments(x_T, mask_T, cu_seqlens) for name, x_T in tokens.items()}
    rows = gather_table(gather_of(batch), table)
    lag, gap = merged_moments(rows["lag"]), merged_moments(rows["gap"])
    lags = {
        "training/weight_version_lag_max": lag.max,
        "training/weight_version_lag_mean": lag.mean,
    }
    if not outputs.has_actor_logprobs:
        return lags
    return lags | {
        "training/rollout_logprob_diff_mean": gap.mean,
        "training/rollout_logprob_diff_max": gap.max,
    }


def score_metrics(batch: Batch, recipe: Recipe) -> dict[str, float]:
    """Mean raw score, the fraction of prompts with ``data.max_prompt_length`` tokens, and with
    several samples that of prompts whose samples have one score."""
    longest = recipe.data.max_prompt_length
    groups = {}
    if recipe.rollout.n > 1:
        informative = batch.group_B[informative_sequences(batch.scores_B, batch.group_B)]
        count = len(batch.group_B.unique())
        groups["critic/score/equal_groups"] = 1 - len(informative.unique()) / count
    return groups | {
        "critic/raw_score/mean": batch.scores_B[batch.episodes.last_E].mean().item(),
        "prompt_length/clip_ratio": (batch.prompt_B >= longest).float().mean().item(),
    }


def kl_metrics(kl: float, kl_coef: float, actor: ActorConfig) -> dict[str, float]:
    """KL between actor and reference, and the coefficients of its penalties."""
    metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": kl_coef}
    if actor.use_kl_loss:
        metrics["actor/kl_coef"] = actor.kl_loss_coef
    return metrics


def performance_metrics(
    batch: Batch, step: int, stages: Mapping[str, float], passes: Mapping[str, float]
) -> dict[str, float]:
    """Seconds by stage, tokens per second, memory of this rank. The step's time is the sum of
    ``stages``, of which ``passes`` are parts."""
    seconds, tokens = sum(stages.values()), int(batch.lengths_B.sum())
    per_token = {"gen": max(float(batch.response_B.sum()), 1.0)}
    timed = {**stages, **passes}
    metrics = {f"timing_s/{name}": value for name, value in timed.items()}
    metrics |= {
        f"timing_per_token_ms/{name}": 1e3 * value / per_token.get(name, tokens)
        for name, value in timed.items()
    }
    return metrics | {
        "episode": float(step * batch.num_sequences),
        "eps": batch.num_sequences / seconds,
        "timing_s/step": seconds,
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / seconds / torch.distributed.get_world_size(),
        "perf/tokens_per_second": tokens / seconds,
        "perf/max_memory_allocated_gb": device.peak_memory_bytes() / 2**30,
        "perf/max_memory_reserved_gb": device.peak_reserved_bytes() / 2**30,
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
        "training/global_step": float(step),
    }


def rank_metrics(probe_ms: float) -> dict[str, float]:
    """Milliseconds of the probe and peak of the memory in GiB, by rank. Collective."""
    everyone = all_gather_objects((probe_ms, device.peak_memory_bytes() / 2**30))
    probes, memories = zip(*everyone, strict=True)
    return by_rank(PROBE, probes) | by_rank(MEMORY, memories)


def by_rank(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """The metrics of a number that each rank has: of up to ``_ALL_RANKS`` ranks all; of more the
    smallest, the median, the largest and those of the ``_HIGHEST`` ranks, as a thousand would make
    a line of metrics.jsonl 70 KB."""
    if len(values) <= _ALL_RANKS:
        return {f"{prefix}{rank}": value for rank, value in enumerate(values)}
    highest = sorted(range(len(values)), key=lambda rank: values[rank])[-_HIGHEST:]
    made = zip(OF_RANKS, (min(values), median(values), max(values)), strict=True)
    metrics = {f"{prefix}{part}": value for part, value in made}
    return metrics | {f"{prefix}{rank}": values[rank] for rank in sorted(highest)}


def balance_metrics(lengths: Sequence[int], dp: int) -> dict[str, float]:
    """verl's ``global_seqlen/*``: tokens per data-parallel rank, before and after balancing."""
    bounds = [len(lengths) * rank // dp for rank in range(dp + 1)]
    unbalanced = [sum(lengths[a:b]) for a, b in itertools.pairwise(bounds)]
    shares = partition(lengths, dp, equal_count=True)
    balanced = [sum(lengths[i] for i in share) for share in shares]
    return {
        "global_seqlen/min": float(min(unbalanced)),
        "global_seqlen/max": float(max(unbalanced)),
        "global_seqlen/minmax_diff": float(max(unbalanced) - min(unbalanced)),
        "global_seqlen/balanced_min": float(min(balanced)),
        "global_seqlen/balanced_max": float(max(balanced)),
        "global_seqlen/mean": sum(lengths) / dp,
    }


def update_metrics(mini_batches: Sequence[dict[str, float]], epochs: int = 1) -> dict[str, float]:
    """Average the statistics of an update's mini-batches, each summed over micro-batches and ranks.
    ``critic/vf_loss_first`` and ``_last`` are the critic's mean loss in the first and in the last
    of several epochs. ``val/ratio_var`` is the variance (unbiased) of ``val/ratio`` over the
    mini-batches, as TRL reports it; 0 for a single one."""
    if not mini_batches:
        return {}
    count = len(mini_batches)
    metrics = {name: sum(m[name] for m in mini_batches) / count for name in mini_batches[0]}
    if "val/ratio" in metrics:
        squares = sum((m["val/ratio"] - metrics["val/ratio"]) ** 2 for m in mini_batches)
        metrics["val/ratio_var"] = squares / max(count - 1, 1)
    losses = [m["critic/vf_loss"] for m in mini_batches if "critic/vf_loss" in m]
    if epochs > 1 and losses:
        size = count // epochs
        metrics["critic/vf_loss_first"] = sum(losses[:size]) / size
        metrics["critic/vf_loss_last"] = sum(losses[-size:]) / size
    return metrics


def mean_scores(episodes: Sequence[Episode]) -> dict[str, float]:
    scores: dict[str, list[float]] = {}
    for episode in episodes:
        scores.setdefault(episode.prompt.data_source, []).append(episode.scored.score)
    return {source: sum(found) / len(found) for source, found in scores.items()}


def mean_numbers(episodes: Sequence[Episode]) -> dict[tuple[str, str], float]:
    """Means of the numbers that accompany scores, by data source and name, each over the responses
    of the source that have it."""
    numbers: dict[tuple[str, str], list[float]] = {}
    for episode in episodes:
        for name, value in episode.scored.numbers.items():
            numbers.setdefault((episode.prompt.data_source, name), []).append(value)
    return {key: sum(found) / len(found) for key, found in numbers.items()}


def reward_metrics(episodes: Sequence[Episode], greedy: Sequence[Episode]) -> dict[str, float]:
    """``reward/<source>/<name>/mean`` of the numbers that accompany scores, ``reward/errors``, and
    counts such as ``reward/timeouts`` of responses, also greedy ones, that were not scored."""
    numbers = mean_numbers(episodes)
    metrics = {f"reward/{source}/{name}/mean": mean for (source, name), mean in numbers.items()}
    everything = [*episodes, *greedy]
    metrics |= {f"reward/{reason}": count for reason, count in unscored(everything).items()}
    return metrics | {"reward/errors": float(len(errors_of(everything)))}


def conversation_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """``conversation/turns/*`` and ``conversation/trained_tokens/*`` of the policy,
    ``conversation/inserted_tokens/*`` of agents, and ``conversation/sequences/*`` of episodes."""
    parts = [each.sequences for each in episodes]
    counts = {
        "turns": [sum(each.turns for each in part) for part in parts],
        "trained_tokens": [sum(each.length - each.inserted for each in part) for part in parts],
        "inserted_tokens": [sum(each.inserted for each in part) for part in parts],
        "sequences": [len(part) for part in parts],
    }
    metrics: dict[str, float] = {}
    for name, values in counts.items():
        metrics |= _mean_max_min(f"conversation/{name}", torch.tensor(values))
    return metrics


def staleness_metrics(episodes: Sequence[Episode], step: int, bound: int) -> dict[str, float]:
    """``training/staleness/K``: share of the policy's tokens that were K updates old in a step;
    with ``rollout.max_staleness`` 0 there is nothing to report."""
    if not bound:
        return {}
    parts = [part for each in episodes for one in each.sequences for part in one.parts]
    counts = Counter[int]()
    for version, tokens in parts:
        counts[step - 1 - version] += tokens if version != NO_WEIGHTS else 0
    total = max(counts.total(), 1)
    return {f"training/staleness/{age}": counts[age] / total for age in range(bound + 1)}


def errors_of(episodes: Sequence[Episode]) -> list[str]:
    return [each.scored.error for each in episodes if each.scored.error is not None]


def unscored(episodes: Sequence[Episode]) -> dict[str, float]:
    """Number of responses that were not scored, by reason."""
    found = [each.scored.unscored for each in episodes]
    return {reason: float(found.count(reason)) for reason in UNSCORED}


_OWN: dict[str, Metric] = {
    "experience": lambda data: experience_metrics(data.experience, data.recipe.algorithm.gae_unit),
    "calibration": lambda data: (
        calibration(data.experience, data.recipe.algorithm.gae_unit)
        if data.recipe.algorithm.uses_critic
        else {}
    ),
    "explained_by_age": lambda data: explained_by_age(data.experience, data.step, data.recipe),
    "scores": lambda data: score_metrics(data.scored, data.recipe),
    "mismatch": lambda data: mismatch_metrics(data.outputs, data.step),
}
register.metric.fill(_OWN)

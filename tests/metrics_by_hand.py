"""Metrics of a step written out from its dump, without the package's formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mppo.batch import Experience
from mppo.config.schema import Recipe
from mppo.dumps.step_dump import StepDump

# why a metric of metrics.jsonl cannot be computed from a dump; docs/report.md says the same
NOT_IN_A_DUMP = {
    r"timing_s/.+|timing_per_token_ms/.+|eps": "time",
    r"perf/(?!total_num_tokens).+": "time, memory and speed of the machine",
    r"(actor|critic)/(grad_norm|lr|pg_.+|ppo_kl|entropy|vf_loss|vf_clipfrac|vpred_mean)": "update",
    r"(policy|loss)/.+_avg|val/(clipfrac_avg|ratio|ratio_var)|lr": "update, TRL's names",
    r"training/(epoch|skipped_steps)": "the run's counters",
}


def metrics_by_hand(
    stored: Experience, header: StepDump, recipe: Recipe, step: int
) -> dict[str, float]:
    """All metrics that a dump determines, of a run on one data-parallel rank.

    Args:
        stored: the dump of all ranks.
        header: the dump's.
        recipe: the run's.
        step: the PPO step.
    """
    old, batch, rows = stored.old, stored.old.batch, header.rows
    inside = batch.response_mask_T > 0
    parts = [slice(a, b) for a, b in itertools.pairwise(batch.cu_seqlens.tolist())]

    def tokens(x_T: Tensor) -> list[list[float]]:
        """The numbers of each response's tokens."""
        return [x_T[part][inside[part]].double().tolist() for part in parts]

    actor, engine = tokens(old.logprobs_T), tokens(batch.rollout_logprobs_T)
    gap = [[p - q for p, q in zip(*pair)] for pair in zip(actor, engine)]
    probs = [abs(math.exp(p) - math.exp(q)) for p, q in zip(_flat(actor), _flat(engine))]
    kl = tokens(old.logprobs_T - old.ref_logprobs_T)
    rewards = [sum(each) for each in tokens(stored.rewards_T)]
    weights = _flat(tokens(stored.loss_weight_T))
    lengths = [len(each) for each in actor]
    prompts = [len(inside[part]) - n for part, n in zip(parts, lengths)]
    total = float(len(inside))
    cut = [row.finish_reason == "length" for row in rows]
    scores, raw = batch.scores_B.tolist(), [row.score for row in rows]
    lag = _flat(tokens((step - 1 - batch.weight_version_T).float()))
    returns, values = _flat(tokens(stored.returns_T)), _flat(tokens(old.values_T))
    errors = [a - b for a, b in zip(returns, values)]
    groups = zip(raw[::2], raw[1::2])  # two samples of each prompt
    surprise = [(-_mean(a), -_mean(b)) for a, b in zip(actor, engine)]
    found = {
        **_range("critic/score", scores),
        **_range("critic/rewards", rewards),
        **_range("critic/advantages", _flat(tokens(stored.advantages_T))),
        **_range("critic/returns", returns),
        **_range("critic/values", values),
        **_range("response_length", lengths),
        **_range("response_length_non_aborted", [n for n in lengths if n]),
        **_range("prompt_length", prompts),
        "critic/vf_explained_var": 1 - _variance(errors) / (_variance(returns) + 1e-5),
        "critic/raw_score/mean": _mean(raw),
        "critic/score/equal_groups": _mean([a == b for a, b in groups]),
        "response_length/clip_ratio": _mean(cut),
        "response_length_non_aborted/clip_ratio": _mean([c for c, n in zip(cut, lengths) if n]),
        "response/aborted_ratio": _mean([n == 0 for n in lengths]),
        "prompt_length/clip_ratio": _mean([n >= recipe.data.max_prompt_length for n in prompts]),
        "objective/kl": _mean([sum(each) for each in kl]),
        "objective/entropy": _mean([-sum(each) for each in actor]),
        "objective/non_score_reward": _mean([r - s for r, s in zip(rewards, scores)]),
        "objective/scores": _mean(scores),
        "objective/rlhf_reward": _mean(rewards),
        "actor/reward_kl_penalty": _mean([_mean(each) for each in kl]),
        "actor/reward_kl_penalty_coeff": header.kl_coef,
        "val/num_eos_tokens": float(sum(n > 0 and not c for c, n in zip(cut, lengths))),
        "training/weight_version_lag_mean": _mean(lag),
        "training/weight_version_lag_max": max(lag),
        "training/rollout_logprob_diff_mean": _mean(map(abs, _flat(gap))),
        "training/rollout_logprob_diff_max": max(map(abs, _flat(gap))),
        "training/rollout_logprobs_abs_diff": _mean(map(abs, _flat(gap))),
        "training/rollout_probs_diff_mean": _mean(probs),
        "training/rollout_probs_diff_max": max(probs),
        "rollout_corr/kl": -_mean(_flat(gap)),
        "rollout_corr/k3_kl": _mean([math.exp(d) - 1 - d for d in _flat(gap)]),
        "rollout_corr/chi2_token": _mean([math.exp(2 * d) - 1 for d in _flat(gap)]),
        "rollout_corr/chi2_seq": _mean([math.exp(2 * sum(each)) - 1 for each in gap]),
        "rollout_corr/training_ppl": _mean([math.exp(a) for a, _ in surprise]),
        "rollout_corr/rollout_ppl": _mean([math.exp(b) for _, b in surprise]),
        "rollout_corr/log_ppl_diff": _mean([a - b for a, b in surprise]),
        "rollout_corr/log_ppl_abs_diff": _mean([abs(a - b) for a, b in surprise]),
        "rollout_corr/ppl_ratio": _mean([math.exp(a - b) for a, b in surprise]),
        "rollout_corr/rollout_is_mean": _mean(weights),
        "rollout_corr/rollout_is_max": max(weights),
        "rollout_corr/rollout_is_min": min(weights),
        "rollout_corr/rollout_is_std": _mean([(w - _mean(weights)) ** 2 for w in weights]) ** 0.5,
        "rollout_corr/rollout_is_eff_sample_size": _mean(weights) ** 2
        / _mean([w * w for w in weights]),
        "rollout_corr/rollout_masked_fraction": _mean([w == 0 for w in weights]),
        "reward/errors": float(sum(row.error is not None for row in rows)),
        "episode": float(step * len(rows)),
        "training/global_step": float(step),
        "perf/total_num_tokens": total,
        # one data-parallel rank has all tokens
        **{f"global_seqlen/{n}": total for n in ("min", "max", "mean")},
        **{f"global_seqlen/balanced_{n}": total for n in ("min", "max")},
        "global_seqlen/minmax_diff": 0.0,
    }
    for reason in ("timeouts", "failures", "bad_verdicts"):
        found[f"reward/{reason}"] = float(sum(row.unscored == reason for row in rows))
    for source, name in {(row.data_source, name) for row in rows for name in row.numbers}:
        mine = [r.numbers[name] for r in rows if r.data_source == source and name in r.numbers]
        found[f"reward/{source}/{name}/mean"] = _mean(mine)
    return found


def validation_by_hand(lines: Sequence[dict[str, Any]], source: str, n: int) -> dict[str, float]:
    """All metrics of a validation from the responses that it wrote; n samples for each prompt.

    Args:
        lines: of the file, of one data source, whose reward reads answers and says which are right.
        source: the data source.
        n: samples, a power of two.
    """
    core, extra = f"val-core/{source}", f"val-aux/{source}"
    groups = [[each for each in lines if each["index"] == i] for i in {x["index"] for x in lines}]
    mean = _mean([each["score"] for each in lines])
    found = {
        "val/reward": mean,
        f"{core}/reward/mean": mean,
        f"{core}/reward/mean@{n}": _mean([_mean([x["score"] for x in each]) for each in groups]),
        "val/response_length/mean": _mean([each["length"] for each in lines]),
        "val/response_length/clip_ratio": _mean([x["finish_reason"] == "length" for x in lines]),
    }
    for name in lines[0]["numbers"]:
        place = core if name == "acc" else extra
        found[f"{place}/{name}/mean"] = _mean([each["numbers"][name] for each in lines])
    for k in (2**i for i in range(n.bit_length())):
        place = core if k == n else extra
        drawn = [any(x["right"] for x in d) for g in groups for d in itertools.combinations(g, k)]
        found[f"{place}/acc/pass@{k}"] = _mean(drawn)
        if k > 1:
            votes = [_vote(each[i : i + k]) for each in groups for i in range(0, n, k)]
            found[f"{place}/acc/maj@{k}"] = _mean(votes)
    reasons = ("timeouts", "failures", "bad_verdicts")
    for name in reasons:
        found[f"val/reward_{name}"] = float(sum(each["error"] == name for each in lines))
    unscored = [each["error"] for each in lines if each["error"] not in (None, *reasons)]
    return found | {"val/reward_errors": float(len(unscored))}


def _vote(samples: Sequence[dict[str, Any]]) -> bool:
    """Whether the most frequent answer is right; of equally frequent ones the first."""
    answers = [each["answer"] for each in samples if each["answer"]]
    if not answers:
        return False
    winner = max(dict.fromkeys(answers), key=answers.count)
    return next(each["right"] for each in samples if each["answer"] == winner)


def _flat(parts: Iterable[Iterable[float]]) -> list[float]:
    return list(itertools.chain.from_iterable(parts))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found)


def _variance(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).var())


def _range(name: str, values: Sequence[float]) -> dict[str, float]:
    found = {"mean": _mean(values), "max": max(values), "min": min(values)}
    return {f"{name}/{which}": float(value) for which, value in found.items()}

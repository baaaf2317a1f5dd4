"""Metrics of a step written out from its dump, without the package's formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mppo.batch.outputs import Experience
from mppo.dumps.step_dump import StepDump
from mppo.recipe.schema import Recipe

# why a metric of metrics.jsonl cannot be computed from a dump; docs/report.md says the same
NOT_IN_A_DUMP = {
    r"timing_s/.+|timing_per_token_ms/.+|eps": "time",
    r"perf/(?!total_num_tokens).+": "time, memory and speed of the machine",
    r"(actor|critic)/(grad_norm|lr|pg_.+|ppo_kl|entropy|vf_loss|vf_clipfrac|vpred_mean)": "update",
    r"(policy|loss)/.+_avg|val/(clipfrac_avg|ratio|ratio_var)|lr": "update, TRL's names",
    r"training/(epoch|skipped_steps)": "the run's counters",
}


class DumpedStep:
    """A dumped step as lists: of responses, and of the numbers of their tokens.

    Args:
        stored: the dump of all ranks.
        header: the dump's.
    """

    def __init__(self, stored: Experience, header: StepDump) -> None:
        self.stored, self.rows, self.batch = stored, header.rows, stored.old.batch
        self.inside = self.batch.response_mask_T > 0
        ends = self.batch.cu_seqlens.tolist()
        self.parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
        self.actor = self.tokens(stored.old.logprobs_T)
        self.engine = self.tokens(self.batch.rollout_logprobs_T)
        self.kl = self.tokens(stored.old.logprobs_T - stored.old.ref_logprobs_T)
        self.rewards = [sum(each) for each in self.tokens(stored.rewards_T)]
        self.scores = self.batch.scores_B.tolist()
        self.lengths = [len(each) for each in self.actor]
        sizes = zip(self.parts, self.lengths)
        self.prompts = [len(self.inside[part]) - length for part, length in sizes]
        self.cut = [row.finish_reason == "length" for row in header.rows]

    def tokens(self, x_T: Tensor) -> list[list[float]]:
        """The numbers of each response's tokens."""
        return [x_T[part][self.inside[part]].double().tolist() for part in self.parts]


def metrics_by_hand(
    stored: Experience, header: StepDump, recipe: Recipe, step: int
) -> dict[str, float]:
    """All metrics that a dump determines, of a run on one data-parallel rank.

    Args:
        stored: the dump of all ranks.
        header: the dump's.
        recipe: the run's, with two samples of each prompt.
        step: the PPO step.
    """
    dumped = DumpedStep(stored, header)
    lag = _flat(dumped.tokens((step - 1 - dumped.batch.weight_version_T).float()))
    total = float(len(dumped.inside))
    return {
        **_scores(dumped),
        **_lengths(dumped, recipe.data.max_prompt_length),
        **_mismatch(dumped),
        **_weights(_flat(dumped.tokens(stored.loss_weight_T))),
        **_scoring(dumped),
        "actor/reward_kl_penalty": _mean([_mean(each) for each in dumped.kl]),
        "actor/reward_kl_penalty_coeff": header.kl_coef,
        "training/weight_version_lag_mean": _mean(lag),
        "training/weight_version_lag_max": max(lag),
        "episode": float(step * len(header.rows)),
        "training/global_step": float(step),
        "perf/total_num_tokens": total,
        # one data-parallel rank has all tokens
        **{f"global_seqlen/{n}": total for n in ("min", "max", "mean")},
        **{f"global_seqlen/balanced_{n}": total for n in ("min", "max")},
        "global_seqlen/minmax_diff": 0.0,
    }


def _scores(dumped: DumpedStep) -> dict[str, float]:
    """Scores, rewards, advantages, returns, values, and TRL's objective."""
    stored, scores, rewards = dumped.stored, dumped.scores, dumped.rewards
    returns = _flat(dumped.tokens(stored.returns_T))
    values = _flat(dumped.tokens(stored.old.values_T))
    errors = [a - b for a, b in zip(returns, values)]
    raw = [row.score for row in dumped.rows]
    explained = {}
    if max(returns) - min(returns) > 1e-5 * max(map(abs, [*returns, *errors])):
        share = _variance(errors) / (_variance(returns) + 1e-5)
        explained["critic/vf_explained_var"] = 1 - share
        left_T = stored.returns_T - stored.old.values_T
        left, whole = (_variance_of_episodes(dumped.tokens(x)) for x in (left_T, stored.returns_T))
        explained["critic/vf_explained_var_by_episode"] = 1 - left / (whole + 1e-5)
    return {
        **explained,
        **_calibration(values, returns),
        **_range("critic/score", scores),
        **_range("critic/rewards", rewards),
        **_range("critic/advantages", _flat(dumped.tokens(stored.advantages_T))),
        **_range("critic/returns", returns),
        **_range("critic/values", values),
        "critic/raw_score/mean": _mean(raw),
        "critic/score/equal_groups": _mean([a == b for a, b in zip(raw[::2], raw[1::2])]),
        "objective/kl": _mean([sum(each) for each in dumped.kl]),
        "objective/entropy": _mean([-sum(each) for each in dumped.actor]),
        "objective/non_score_reward": _mean([r - s for r, s in zip(rewards, scores)]),
        "objective/scores": _mean(scores),
        "objective/rlhf_reward": _mean(rewards),
    }


def _calibration(values: list[float], returns: list[float]) -> dict[str, float]:
    """Mean value and return of each tenth of the tokens; those of one thousandth of the range of
    values are in one tenth."""
    low, width = min(values), (max(values) - min(values)) / 1000
    cells: dict[int, list[int]] = {}
    for token, value in enumerate(values):
        cells.setdefault(min(int((value - low) / width), 999), []).append(token)
    groups: dict[int, list[int]] = {}
    before = 0
    for _, tokens in sorted(cells.items()):
        middle = (before + len(tokens) / 2) / len(values)
        groups.setdefault(int(10 * middle), []).extend(tokens)
        before += len(tokens)
    found, error = {}, 0.0
    for number, tokens in groups.items():
        value, target = (_mean([x[t] for t in tokens]) for x in (values, returns))
        found[f"critic/calibration/value/{number}"] = value
        found[f"critic/calibration/return/{number}"] = target
        error += abs(target - value) * len(tokens) / len(values)
    return {**found, "critic/calibration/error": error}


def _lengths(dumped: DumpedStep, longest_prompt: int) -> dict[str, float]:
    """Lengths of prompts and responses, and how the responses ended."""
    lengths, prompts, cut = dumped.lengths, dumped.prompts, dumped.cut
    return {
        **_range("response_length", lengths),
        **_range("response_length_non_aborted", [n for n in lengths if n]),
        **_range("prompt_length", prompts),
        "response_length/clip_ratio": _mean(cut),
        "response_length_non_aborted/clip_ratio": _mean([c for c, n in zip(cut, lengths) if n]),
        "response/aborted_ratio": _mean([n == 0 for n in lengths]),
        "prompt_length/clip_ratio": _mean([n >= longest_prompt for n in prompts]),
        "val/num_eos_tokens": float(sum(n > 0 and not c for c, n in zip(cut, lengths))),
    }


def _mismatch(dumped: DumpedStep) -> dict[str, float]:
    """Gap between the log-probabilities of actor and engine."""
    pairs = list(zip(dumped.actor, dumped.engine))
    gap = [[p - q for p, q in zip(*pair)] for pair in pairs]
    size = [abs(d) for d in _flat(gap)]
    probs = [abs(math.exp(p) - math.exp(q)) for pair in pairs for p, q in zip(*pair)]
    surprise = [(-_mean(a), -_mean(b)) for a, b in pairs]
    return {
        "training/rollout_logprob_diff_mean": _mean(size),
        "training/rollout_logprob_diff_max": max(size),
        "training/rollout_logprobs_abs_diff": _mean(size),
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
    }


def _weights(weights: list[float]) -> dict[str, float]:
    """The tokens' weights in the loss."""
    mean, square = _mean(weights), _mean([w * w for w in weights])
    return {
        "rollout_corr/rollout_is_mean": mean,
        "rollout_corr/rollout_is_max": max(weights),
        "rollout_corr/rollout_is_min": min(weights),
        "rollout_corr/rollout_is_std": _mean([(w - mean) ** 2 for w in weights]) ** 0.5,
        "rollout_corr/rollout_is_eff_sample_size": mean**2 / square,
        "rollout_corr/rollout_masked_fraction": _mean([w == 0 for w in weights]),
    }


def _scoring(dumped: DumpedStep) -> dict[str, float]:
    """Responses without a score, and the numbers that come with scores."""
    rows = dumped.rows
    found = {"reward/errors": float(sum(row.error is not None for row in rows))}
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


def _variance_of_episodes(responses: Sequence[Sequence[float]]) -> float:
    """Variance of tokens that share the weight 1 of their response."""
    filled = [each for each in responses if each]
    mean = _mean([_mean(each) for each in filled])
    squares = [_mean([(x - mean) ** 2 for x in each]) for each in filled]
    return sum(squares) / (len(filled) - 1)


def _range(name: str, values: Sequence[float]) -> dict[str, float]:
    found = {"mean": _mean(values), "max": max(values), "min": min(values)}
    return {f"{name}/{which}": float(value) for which, value in found.items()}

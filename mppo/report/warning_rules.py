"""Warnings about a run's course: small functions of its last steps, with what to try.

``docs/report.md`` lists the thresholds. A rule reads metrics of :mod:`mppo.trainer.metrics`, and is
silent where a step lacks them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from mppo.report import history

Rows = Sequence[Mapping[str, float]]
Steps = Sequence[tuple[int, Mapping[str, float]]]
Finding = Callable[[Rows], "str | None"]
"""What is wrong with the last steps, with the number; None if nothing is."""

WINDOW = 5
"""Steps over which a rule averages; before, no rule warns."""
MOST_STEPS = 20
"""Steps that the rules look back, besides the first of the run."""
KL_PER_TOKEN = 0.3
ENTROPY_SHARE, ENTROPY_BELOW = 0.1, 0.1
EQUAL_GROUPS = 0.8
CUT_OFF = 0.9
EXPLAINED, EXPLAINED_AFTER = 0.05, MOST_STEPS
LAGGING = 0.1
LOGPROB_GAP = 0.05
STARVING = -0.98
SLOW_RANK = 1.5
SHARE_OF_STEP = {"gen": 0.9, "update": 0.8, "log_probs": 0.6}
OTHER_SHARE = 0.5

_PHASE_ADVICE = {
    "gen": "more engine ranks or servers, rollout.mode: disaggregated with rollout.max_staleness, "
    "or a lower data.max_response_length",
    "reward": "a reward server (reward.name: remote), or a faster verifier",
    "save_checkpoint": "trainer.async_save: true, or a higher trainer.save_freq",
    "testing": "a higher trainer.test_freq, or a lower data.val_size",
    "dump_rollouts": "a faster disk, or trainer.dump_rollouts: false",
}
_LAYER = re.compile(r"(\w+)/moe/layer_(\d+)/min_vio")


@dataclass(frozen=True)
class RunWarning:
    """A warning about the last steps; its name is that of the rule, such as ``kl_runs_away``."""

    name: str
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.text}; try {self.advice}"


RULES: dict[str, tuple[Finding, str | Callable[[Rows], str]]] = {}
"""By name of its function: a rule, and what to try, or a function of the steps that returns it."""


def _rule(advice: str | Callable[[Rows], str]) -> Callable[[Finding], Finding]:
    def register(find: Finding) -> Finding:
        RULES[find.__name__] = find, advice
        return find

    return register


def _mean(rows: Rows, name: str) -> float | None:
    """Mean of a metric over the last ``WINDOW`` steps; None if one of them lacks it."""
    values = [row.get(name, math.nan) for row in rows[-WINDOW:]]
    mean = sum(values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else None


@_rule("a lower actor.optim.lr, or a higher algorithm.kl_ctrl.kl_coef or actor.kl_loss_coef")
def kl_runs_away(rows: Rows) -> str | None:
    """The policy is far from the reference."""
    kl, length = _mean(rows, history.KL), _mean(rows, history.LENGTH)
    if kl is None or not length or kl / length <= KL_PER_TOKEN:
        return None
    return f"the KL to the reference is {kl / length:.2f} nats per token ({kl:.3g} per response)"


@_rule(
    "actor.entropy_coeff above 0, a higher actor.clip_ratio_high, a KL penalty, or a lower "
    "actor.optim.lr"
)
def entropy_collapses(rows: Rows) -> str | None:
    """The policy has become nearly deterministic."""
    now = _mean(rows, "policy/entropy_avg")
    before = _mean(rows[:WINDOW], "policy/entropy_avg")
    if now is None or before is None or len(rows) < 2 * WINDOW:
        return None
    if now >= ENTROPY_BELOW or now >= ENTROPY_SHARE * before:
        return None
    return f"the entropy fell from {before:.3g} nats in the first steps to {now:.3g}"


@_rule(
    "another difficulty of the prompts, a finer reward, or a check of the verifier on samples.jsonl"
)
def rewards_are_equal(rows: Rows) -> str | None:
    """All responses of each step have the same score: there is nothing to learn from."""
    last = [(r.get("critic/score/min"), r.get("critic/score/max")) for r in rows[-WINDOW:]]
    if any(low is None or low != high for low, high in last):
        return None
    return f"all responses of each of the last {WINDOW} steps have one score ({last[-1][0]:g})"


@_rule("algorithm.filter_groups, a higher rollout.n, or prompts of another difficulty")
def groups_are_equal(rows: Rows) -> str | None:
    """Most groups of samples of one prompt have one score."""
    share = _mean(rows, "critic/score/equal_groups")
    if share is None or share <= EQUAL_GROUPS:
        return None
    return f"{share:.0%} of the prompts have samples of one score only"


@_rule(
    "a higher data.max_response_length, a check of rollout.stop_token_ids and of the chat "
    "template, or reward.overlong_buffer_len"
)
def responses_are_cut_off(rows: Rows) -> str | None:
    """Nearly all responses reach the length limit."""
    share = _mean(rows, "response_length/clip_ratio")
    if share is None or share < CUT_OFF:
        return None
    return f"{share:.0%} of the responses are cut off"


@_rule(
    "a higher critic.optim.lr, trainer.critic_warmup, more critic.ppo_epochs, or an estimator "
    "without a critic (algorithm.adv_estimator)"
)
def critic_explains_nothing(rows: Rows) -> str | None:
    """The critic's values are no better than a constant."""
    if len(rows) < EXPLAINED_AFTER or "critic/vf_loss" not in rows[-1]:
        return None
    explained = _mean(rows, "critic/vf_explained_var")
    if explained is None or explained >= EXPLAINED:
        return None
    return f"the critic explains {explained:.1%} of the returns' variance"


@_rule(
    "trainer.critic_warmup, or a critic from trainer.stage: value_pretraining (critic.path; "
    "docs/algorithms.md)"
)
def critic_was_not_pretrained(rows: Rows) -> str | None:
    """The actor learns from the first steps on, from a critic that knows nothing yet."""
    if len(rows) >= EXPLAINED_AFTER or any("actor/pg_loss" not in row for row in rows[:WINDOW]):
        return None
    explained = _mean(rows, "critic/vf_explained_var")
    if explained is None or explained >= EXPLAINED or "critic/vf_loss" not in rows[-1]:
        return None
    return (
        f"the actor learns already, but the critic explains {explained:.1%} of the returns' "
        f"variance after {len(rows)} steps"
    )


@_rule("more critic.ppo_epochs, a higher critic.optim.lr, or a lower actor.optim.lr")
def critic_lags(rows: Rows) -> str | None:
    """Values lie on one side of the returns, which explained variance does not see."""
    if len(rows) < EXPLAINED_AFTER or "critic/vf_loss" not in rows[-1]:
        return None
    means, ends = ("critic/returns/mean", "critic/values/mean"), ("max", "min")
    gaps = [row.get(means[0], math.nan) - row.get(means[1], math.nan) for row in rows[-WINDOW:]]
    high, low = (_mean(rows, f"critic/returns/{end}") for end in ends)
    if high is None or low is None or high <= low or not all(map(math.isfinite, gaps)):
        return None
    side = "below" if gaps[-1] > 0 else "above"
    gap = abs(sum(gaps)) / len(gaps)
    if min(gaps) <= 0 <= max(gaps) or gap <= LAGGING * (high - low):
        return None
    return (
        f"the critic's values were {side} the returns in each of the last {WINDOW} steps, by "
        f"{gap:.3g} in the mean ({gap / (high - low):.0%} of the returns' range)"
    )


@_rule(
    "algorithm.rollout_correction.rollout_is: token, rollout.dtype as model.dtype, or with experts "
    "actor.router_replay: R3"
)
def rollout_and_actor_disagree(rows: Rows) -> str | None:
    """Engine and actor give the sampled tokens different probabilities."""
    gap = _mean(rows, "training/rollout_logprob_diff_mean")
    if gap is None or gap <= LOGPROB_GAP:
        return None
    return f"log-probabilities of engine and actor differ by {gap:.3g} nats in the mean"


@_rule(
    "megatron.moe_router_load_balancing_type with moe_aux_loss_coeff, or "
    "moe_router_bias_update_rate (docs/moe.md), or a lower actor.optim.lr"
)
def experts_starve(rows: Rows) -> str | None:
    """An expert gets almost no token."""
    found = []
    for match in filter(None, map(_LAYER.fullmatch, rows[-1] if rows else ())):
        load = _mean(rows, match[0])
        if load is not None and load < STARVING:
            found.append(f"{match[1]} layer {match[2]}")
    if not found:
        return None
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"an expert gets less than 2% of an even load in {', '.join(found[:3])}{more}"


@_rule("a look at that device's clocks, temperature and other processes, or the job without it")
def rank_is_slow(rows: Rows) -> str | None:
    """One rank needs longer than the others for the same arithmetic."""
    times = [
        {n.removeprefix(history.PROBE): row[n] for n in row if n.startswith(history.PROBE)}
        for row in rows[-WINDOW:]
    ]
    if len(times) < WINDOW or any(len(each) < 3 for each in times):
        return None
    medians = [each.get("median") or median(each.values()) for each in times]
    slow = [
        {rank for rank, time in each.items() if rank.isdecimal() and time > SLOW_RANK * middle}
        for each, middle in zip(times, medians)
    ]
    always = sorted(set.intersection(*slow), key=int)
    if not always:
        return None
    ratio = min(each[always[0]] / middle for each, middle in zip(times, medians))
    ranks = "ranks " if len(always) > 1 else "rank "
    return (
        f"{ranks}{', '.join(always)} took at least {ratio:.1f} x the median time for the same "
        f"product of matrices in each of the last {WINDOW} steps"
    )


def _dominating_phase(rows: Rows) -> tuple[str, float] | None:
    """The first phase above its share of the step, and its share."""
    total = _mean(rows, history.STEP_TIME)
    if not total:
        return None
    for name in sorted(name for name in rows[-1] if name.startswith("timing_s/")):
        phase, seconds = name.removeprefix("timing_s/"), _mean(rows, name)
        if phase in history.NOT_PHASES or seconds is None:
            continue
        if seconds > SHARE_OF_STEP.get(phase, OTHER_SHARE) * total:
            return phase, seconds / total
    return None


def _phase_advice(rows: Rows) -> str:
    found = _dominating_phase(rows)
    phase = "" if found is None else found[0]
    return _PHASE_ADVICE.get(phase, "a look at docs/troubleshooting.md, It is slow")


@_rule(_phase_advice)
def phase_dominates(rows: Rows) -> str | None:
    """One phase takes most of the step."""
    found = _dominating_phase(rows)
    return None if found is None else f"{found[0]} takes {found[1]:.0%} of a step"


@_rule("a lower optim.lr, or trainer.on_nonfinite: stop and mppo-replay on the step that it keeps")
def steps_are_skipped(rows: Rows) -> str | None:
    """Optimizer steps were skipped because a loss or gradient was not finite."""
    name, recent = "training/skipped_steps", rows[-MOST_STEPS:]
    counts = [row[name] for row in recent if name in row]
    if not counts or counts[-1] <= counts[0]:
        return None
    count = counts[-1] - counts[0]
    return f"{count:.0f} optimizer steps were skipped within {len(recent)} PPO steps"


def current_warnings(rows: Rows) -> list[RunWarning]:
    """The warnings about the last steps of a run, given by its ``course``."""
    if len(rows) < WINDOW:
        return []
    return [
        RunWarning(name, text, advice if isinstance(advice, str) else advice(rows))
        for name, (find, advice) in RULES.items()
        if (text := find(rows)) is not None
    ]


def course(steps: Steps, end: int) -> Rows:
    """The metrics that the rules read, of the first trained steps and of the last ones; ``end``
    steps are over. The first one may be the validation before training."""
    first = 1 if steps and steps[0][0] == 0 else 0
    beginning = steps[first : min(first + WINDOW, end)]
    recent = steps[max(first + WINDOW, end - MOST_STEPS) : end]
    return [row for _, row in (*beginning, *recent)]


@dataclass(frozen=True)
class WarningSpan:
    """Steps in which a rule warned without a pause, with the warning of the last one."""

    warning: RunWarning
    first: int
    last: int
    ongoing: bool


def warning_spans(steps: Steps) -> list[WarningSpan]:
    """The warnings of a run, the ongoing ones first, then by their first step."""
    open_spans: dict[str, tuple[int, RunWarning]] = {}
    found: list[WarningSpan] = []
    before = 0
    for place, (step, _) in enumerate(steps, start=1):
        now = {each.name: each for each in current_warnings(course(steps, place))}
        for name in open_spans.keys() - now.keys():
            began, warning = open_spans.pop(name)
            found.append(WarningSpan(warning, began, before, False))
        for name, warning in now.items():
            open_spans[name] = (open_spans.get(name, (step,))[0], warning)
        before = step
    found += [WarningSpan(warning, began, before, True) for began, warning in open_spans.values()]
    return sorted(found, key=lambda span: (not span.ongoing, span.first))

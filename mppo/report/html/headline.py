"""The top of the page: does it learn, is it stable, where does the time go, what is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mppo.report import history
from mppo.report.console import format_duration
from mppo.report.history import Rows, ends, figures, phase_times
from mppo.report.html.reduced import rounded
from mppo.report.warning_rules import WINDOW, WarningSpan

Answer = tuple[str, str, str]

_FEW = 10
"""Fewer steps than this say nothing about learning."""
_TREND = 2.0
"""Slopes of the reward beyond so many of their standard errors count as a trend."""
_UNSTABLE = frozenset(
    {
        "kl_runs_away", "entropy_collapses", "rollout_and_actor_disagree", "steps_are_skipped",
        "critic_explains_nothing", "critic_lags", "experts_starve",
    }
)  # fmt: skip
"""Warnings about stability."""
_PHASES = 4


def headline(rows: Rows, warnings: Sequence[WarningSpan], failed: bool) -> dict[str, Any]:
    """What the page shows of a run first, as plain values.

    ``answers`` (question, answer, look), ``figures`` (label, first, last, best) and ``phases``
    (name, seconds, share, whether it is a part of the phase before). ``failed``: the run's last
    start ended by an exception.
    """
    return {
        "answers": [
            _learns(rows),
            _is_stable(rows, warnings),
            _time(rows),
            _wrong(warnings, failed),
        ],
        "figures": [
            [f.label, *rounded([f.first, f.last, math.nan if f.best is None else f.best])]
            for f in figures(rows)
        ],
        "phases": [[p.name, *rounded([p.seconds, p.share]), p.is_part] for p in phase_times(rows)],
    }


def trend(values: Sequence[float]) -> float:
    """Slope of at least 3 values over their number, in standard errors of the least-squares slope;
    infinite if they lie on a line that is not level, 0 if all are equal."""
    count = len(values)
    middle, mean = (count - 1) / 2, math.fsum(values) / count
    width = sum((i - middle) ** 2 for i in range(count))
    slope = math.fsum((i - middle) * v for i, v in enumerate(values)) / width
    rest = math.fsum((v - mean - slope * (i - middle)) ** 2 for i, v in enumerate(values))
    error = math.sqrt(rest / (count - 2) / width)
    if error < 1e-12 * max(abs(slope), 1e-300):
        return math.copysign(math.inf, slope) if slope else 0.0
    return slope / error


def _learns(rows: Rows) -> Answer:
    question = "Does it learn?"
    steps, values = history.series(rows, history.REWARD)
    if not values:
        return question, "no reward has been logged", "unknown"
    first, last = ends(values)
    best = max(values)
    text = f"mean reward {first:.4g} → {last:.4g}, best {best:.4g} at step "
    text += str(steps[values.index(best)])
    _, checks = history.series(rows, history.VAL_REWARD)
    if len(checks) > 1:
        text += f"; validation {checks[0]:.4g} → {checks[-1]:.4g}, best {max(checks):.4g}"
    elif checks:
        text += f"; validation {checks[0]:.4g}"
    if len(values) < _FEW:
        return question, f"{len(values)} steps are too few to say: {text}", "unknown"
    if min(values) == best:
        return question, f"no: the mean reward of every step is {best:.4g}", "bad"
    slope = trend(values)
    if slope > _TREND:
        return question, f"yes: {text}", "good"
    verdict = "no, the reward falls" if slope < -_TREND else "no trend in the reward"
    return question, f"{verdict}: {text}", "bad" if slope < -_TREND else "unknown"


def _is_stable(rows: Rows, warnings: Sequence[WarningSpan]) -> Answer:
    question = "Is it stable?"
    found = [span for span in warnings if span.warning.name in _UNSTABLE]
    ongoing = [span.warning.text for span in found if span.ongoing]
    if ongoing:
        return question, f"no: {'; '.join(ongoing)}", "bad"
    if sum(step > 0 for step, _ in rows) < WINDOW:
        return question, f"too early to say: the rules look at {WINDOW} steps", "unknown"
    parts = []
    for label, metric in (
        ("KL", history.KL), ("entropy", "policy/entropy_avg"),
        ("gradient norm", "actor/grad_norm"), ("explained variance", "critic/vf_explained_var"),
    ):  # fmt: skip
        _, values = history.series(rows, metric)
        if values:
            first, last = ends(values)
            parts.append(f"{label} {first:.3g} → {last:.3g}")
    _, skipped = history.series(rows, "training/skipped_steps")
    parts.append(f"{skipped[-1] if skipped else 0:.0f} skipped optimizer steps")
    if found:
        past = f"step {found[0].first} to {found[0].last}: {found[0].warning.text}"
        return question, f"now, but not always ({past}): {', '.join(parts)}", "unknown"
    return question, f"yes: {', '.join(parts)}", "good"


def _time(rows: Rows) -> Answer:
    question = "Where does the time go?"
    _, seconds = history.series(rows, history.STEP_TIME)
    if not seconds:
        return question, "no step has been timed", "unknown"
    phases = [phase for phase in phase_times(rows) if not phase.is_part]
    shares = ", ".join(f"{phase.name} {phase.share:.0%}" for phase in phases[:_PHASES])
    if len(phases) > _PHASES:
        shares += f", {len(phases) - _PHASES} others"
    took = f"{len(seconds)} steps took {format_duration(sum(seconds))}"
    text = f"{took}, {sum(seconds) / len(seconds):.3g} s each"
    return question, f"{shares}; {text}" if shares else text, "unknown"


def _wrong(warnings: Sequence[WarningSpan], failed: bool) -> Answer:
    question = "What is wrong?"
    if failed:
        text = "the run failed; its output says why"
        return question, f"{text}, and there are warnings, below" if warnings else text, "bad"
    if not warnings:
        return question, "nothing that a rule looks for", "good"
    ongoing = sum(span.ongoing for span in warnings)
    over = len(warnings) - ongoing
    parts = [f"{ongoing} ongoing" if ongoing else "", f"{over} over" if over else ""]
    text = f"warnings, below: {', '.join(filter(None, parts))}"
    return question, text, "bad" if ongoing else "unknown"

"""Metrics of judged responses: means by data source, and how many could not be judged."""

from __future__ import annotations

from collections.abc import Sequence

from mppo.batch import Trajectory
from mppo.report.reporter import Reporter
from mppo.rewards.judgement import UNSCORED, Judgement


def mean_scores(
    trajectories: Sequence[Trajectory], judgements: Sequence[Judgement]
) -> dict[str, float]:
    """Mean score by data source."""
    scores: dict[str, list[float]] = {}
    for trajectory, judgement in zip(trajectories, judgements, strict=True):
        scores.setdefault(trajectory.prompt.data_source, []).append(judgement.score)
    return {source: sum(found) / len(found) for source, found in scores.items()}


def mean_numbers(
    trajectories: Sequence[Trajectory], judgements: Sequence[Judgement]
) -> dict[tuple[str, str], float]:
    """Means of the numbers that came with scores, by data source and name.

    Each is over the responses of the source that have such a number.
    """
    numbers: dict[tuple[str, str], list[float]] = {}
    for trajectory, judgement in zip(trajectories, judgements, strict=True):
        for name, value in judgement.numbers.items():
            numbers.setdefault((trajectory.prompt.data_source, name), []).append(value)
    return {key: sum(found) / len(found) for key, found in numbers.items()}


def training_metrics(
    trajectories: Sequence[Trajectory],
    judgements: Sequence[Judgement],
    greedy: Sequence[Judgement],
) -> dict[str, float]:
    """``reward/<source>/<name>/mean`` of the numbers that came with scores, ``reward/errors``, and
    ``reward/timeouts`` and the like of responses that have no score of their own.

    Args:
        trajectories: responses.
        judgements: of these.
        greedy: of responses that the others are compared with; only their errors count.
    """
    numbers = mean_numbers(trajectories, judgements)
    metrics = {f"reward/{source}/{name}/mean": mean for (source, name), mean in numbers.items()}
    everything = [*judgements, *greedy]
    metrics |= {f"reward/{reason}": count for reason, count in unscored(everything).items()}
    return metrics | {"reward/errors": float(len(errors_of(everything)))}


def validation_metrics(
    trajectories: Sequence[Trajectory], judgements: Sequence[Judgement]
) -> dict[str, float]:
    """Scores and numbers of validation prompts under verl's names.

    ``val-core/<source>/reward/mean`` and ``val-core/<source>/acc/mean``; every other number under
    ``val-aux``. ``val/reward`` is the mean over all responses.
    """
    scores = mean_scores(trajectories, judgements)
    metrics = {f"val-core/{source}/reward/mean": mean for source, mean in scores.items()}
    for (source, name), mean in mean_numbers(trajectories, judgements).items():
        kind = "val-core" if name == "acc" else "val-aux"
        metrics[f"{kind}/{source}/{name}/mean"] = mean
    everything = [judgement.score for judgement in judgements]
    metrics |= {f"val/reward_{reason}": count for reason, count in unscored(judgements).items()}
    return metrics | {
        "val/reward": sum(everything) / len(everything),
        "val/reward_errors": float(len(errors_of(judgements))),
    }


def errors_of(judgements: Sequence[Judgement]) -> list[str]:
    """Why responses could not be judged, one text for each of them."""
    return [each.error for each in judgements if each.error is not None]


def unscored(judgements: Sequence[Judgement]) -> dict[str, float]:
    """How many responses have no score of their own, by reason."""
    found = [each.unscored for each in judgements]
    return {reason: float(found.count(reason)) for reason in UNSCORED}


def show_errors(reporter: Reporter, step: int, judgements: Sequence[Judgement]) -> None:
    """A line where responses could not be judged, how many, and the first one's error; and one for
    each reason why responses have no score of their own."""
    for reason, count in unscored(judgements).items():
        if count:
            told = f"{count:.0f} of {len(judgements)} responses {UNSCORED[reason]} and score 0"
            reporter.line(f"step {step}: {told}")
    errors = errors_of(judgements)
    if errors:
        told = f"{len(errors)} of {len(judgements)} responses could not be judged and score 0"
        reporter.line(f"step {step}: {told} (reward.on_error=zero): {errors[0]}")

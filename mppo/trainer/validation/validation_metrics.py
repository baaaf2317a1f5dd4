"""Metrics of validation, by data source; the same in a run and in ``mppo.evaluate``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import comb

from mppo.batch.episode import Episode
from mppo.batch.score import ResponseScore
from mppo.trainer.metrics import errors_of, mean_numbers, mean_scores, unscored


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that at least one of k samples is right: ``1 - C(n - c, k) / C(n, k)`` for c
    right ones of n >= k; unbiased for independent samples (Chen et al. 2021, arXiv 2107.03374)."""
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Expected best score of k samples, drawn from all without replacement. The i-th of n scores in
    ascending order is the best of ``C(i - 1, k - 1)`` of the ``C(n, k)`` draws. For scores of 0 and
    1 this is ``pass_at_k``."""
    draws = comb(len(scores), k)
    return sum(comb(i, k - 1) / draws * score for i, score in enumerate(sorted(scores)))


def majority_at_k(answers: Sequence[str], right: Sequence[bool], k: int) -> float:
    """Share of right majority votes, each among k samples (Wang et al. 2022, arXiv 2203.11171).

    The votes are those of the ``len(answers) // k`` blocks of k consecutive samples. They share no
    sample, so the mean is unbiased for independent samples. Of answers with equally many votes, the
    one given first wins, and its first sample decides whether it is right. Samples without an
    answer (empty) do not vote; a block without any answer is wrong.
    """
    blocks = [range(first, first + k) for first in range(0, len(answers) - k + 1, k)]
    won = 0
    for block in blocks:
        votes = Counter(answers[i] for i in block if answers[i])
        if votes:
            (winner, _), *_ = votes.most_common(1)  # of equal counts, the one met first
            won += right[next(i for i in block if answers[i] == winner)]
    return won / len(blocks)


def attempt_sizes(samples: int) -> list[int]:
    """The values of k that are reported for n samples: powers of two below n, and n."""
    sizes = [1]
    while 2 * sizes[-1] < samples:
        sizes.append(2 * sizes[-1])
    return sizes if samples == 1 else [*sizes, samples]


Samples = Sequence[ResponseScore]
"""Judgements of the samples of one prompt, in the order of sampling."""


def validation_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Scores and numbers of the validation responses by verl's names:
    ``val-core/<source>/reward/mean`` and ``val-core/<source>/acc/mean``, every other number under
    ``val-aux``; ``val/reward`` is the mean over all responses."""
    scores = mean_scores(episodes)
    metrics = {f"val-core/{source}/reward/mean": mean for source, mean in scores.items()}
    for (source, name), mean in mean_numbers(episodes).items():
        kind = "val-core" if name == "acc" else "val-aux"
        metrics[f"{kind}/{source}/{name}/mean"] = mean
    metrics |= sample_metrics(episodes)
    everything = [each.scored.score for each in episodes]
    metrics |= {f"val/reward_{reason}": count for reason, count in unscored(episodes).items()}
    lengths = [each.length - each.inserted for each in episodes]
    if any(each.inserted for each in episodes):
        metrics["val/turns/mean"] = _mean([each.turns for each in episodes])
    return metrics | {
        "val/reward": sum(everything) / len(everything),
        "val/reward_errors": float(len(errors_of(episodes))),
        "val/response_length/mean": sum(lengths) / len(lengths),
        "val/response_length/clip_ratio": _mean(
            [each.finish_reason == "length" for each in episodes]
        ),
    }


def sample_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """What several samples per prompt show, by data source; empty for one sample. With n samples:
    ``reward/mean@n``; ``acc/pass@k`` if the reward says which responses are right, otherwise
    ``reward/best@k``; and ``acc/maj@k`` if it also reads their answers. k is every power of two
    below n, and n. The values for n are under ``val-core``, the others under ``val-aux``."""
    prompts: dict[str, dict[int, list[ResponseScore]]] = {}
    for episode in episodes:
        of_source = prompts.setdefault(episode.prompt.data_source, {})
        of_source.setdefault(episode.prompt.uid, []).append(episode.scored)
    metrics = {}
    for source, by_uid in prompts.items():
        groups = list(by_uid.values())
        n = min(map(len, groups))
        for name, k, value in _estimates(groups, n) if n > 1 else ():
            metrics[f"{'val-core' if k == n else 'val-aux'}/{source}/{name}@{k}"] = value
    return metrics


def _estimates(groups: Sequence[Samples], n: int) -> Iterator[tuple[str, int, float]]:
    """Name, k and value of each estimate over the prompts of one data source."""
    everything = [judgement for group in groups for judgement in group]
    knows_right = any(judgement.right is not None for judgement in everything)
    has_answers = any(judgement.answer is not None for judgement in everything)
    yield "reward/mean", n, _mean([_mean([one.score for one in group]) for group in groups])
    right = [[one.right is True for one in group] for group in groups]
    for k in attempt_sizes(n):
        if not knows_right:
            if k > 1:
                scores = [[one.score for one in group] for group in groups]
                yield "reward/best", k, _mean([best_at_k(each, k) for each in scores])
            continue
        yield "acc/pass", k, _mean([pass_at_k(len(each), sum(each), k) for each in right])
        if has_answers and k > 1:
            answers = [[one.answer or "" for one in group] for group in groups]
            voted = [majority_at_k(*each, k) for each in zip(answers, right, strict=True)]
            yield "acc/maj", k, _mean(voted)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def metrics_table(metrics: dict[str, float], sources: Sequence[str]) -> list[str]:
    """The metrics by data source as lines of text: a row per source, a column per metric."""
    by_source = {source: dict(_of_source(metrics, source)) for source in sources}
    names = sorted({name for found in by_source.values() for name in found}, key=_column)
    cells = [["data source", *names]]
    for source, found in by_source.items():
        values = [f"{found[name]:.4f}" if name in found else "" for name in names]
        cells.append([source, *values])
    widths = [max(map(len, column)) for column in zip(*cells)]
    align: list[Callable[[str, int], str]] = [str.ljust, *[str.rjust] * len(names)]
    return [
        "  ".join(put(text, width) for put, text, width in zip(align, row, widths)).rstrip()
        for row in cells
    ]


def _of_source(metrics: dict[str, float], source: str) -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        for kind in ("val-core", "val-aux"):
            if name.startswith(f"{kind}/{source}/"):
                yield name.removeprefix(f"{kind}/{source}/"), value


def _column(name: str) -> tuple[bool, str, int]:
    """Order of the columns: rewards and accuracies first, then by name and k."""
    what, _, k = name.partition("@")
    return not what.startswith(("acc/", "reward/")), what, int(k or 0)

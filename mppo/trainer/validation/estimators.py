"""Estimates over several samples of a prompt: pass@k, best@k and maj@k."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb


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

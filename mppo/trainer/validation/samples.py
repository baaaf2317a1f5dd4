"""Tables of responses: the best and the worst of a step, and its first ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mppo.batch.episode import Episode
from mppo.batch.shares import bring_ids_to_first
from mppo.report.console import SampleRow

if TYPE_CHECKING:
    from mppo.trainer.run import Run


def is_sample_step(step: int, total: int, tables: int | None) -> bool:
    """Whether a step (from 1 to ``total``) shows a table of responses: step 1 and others at TRL's
    distance for so many ``tables``; None: the first, the middle and the last step."""
    if tables is None:
        return step in (1, (total + 1) // 2, total)
    return tables > 0 and (step - 1) % max(1, total // tables) == 0


def show_samples(run: Run, step: int, episodes: Sequence[Episode]) -> None:
    """Report a table of responses in the steps of ``is_sample_step``. Collective."""
    trainer = run.recipe.trainer
    if not is_sample_step(step, run.total_steps, trainer.num_sample_generations):
        return
    chosen = chosen_samples([each.scored.score for each in episodes], trainer.sample_table_rows)
    shown = [episodes[place] for place in chosen]
    texts = decoded(run.tokenizer, bring_ids_to_first(shown))
    if not run.reporter.is_main:
        return
    rows = [
        SampleRow(
            episode.prompt.text,
            text,
            episode.prompt.ground_truth,
            episode.scored.answer,
            episode.scored.score,
            which,
        )
        for which, episode, text in zip(chosen.values(), shown, texts, strict=True)
    ]
    run.reporter.samples(step, rows)


def chosen_samples(scores: Sequence[float], rows: int) -> dict[int, str]:
    """The responses of a table, by index "best", "worst" or "" (the first ones). Of equal scores,
    the first response is the best one and the last response the worst one."""
    count = min(rows, len(scores))
    chosen: dict[int, str] = {}
    if count > 1:
        places = range(len(scores))
        chosen[max(places, key=lambda i: (scores[i], -i))] = "best"
        chosen[min(places, key=lambda i: (scores[i], -i))] = "worst"
    for place in range(len(scores)):
        if len(chosen) < count:
            chosen.setdefault(place, "")
    return chosen


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[Tensor]) -> list[str]:
    """The texts of responses, without special tokens; an empty list for none."""
    if not ids:
        return []
    return tokenizer.batch_decode([each.tolist() for each in ids], skip_special_tokens=True)

"""Responses to the validation prompts, files of them, and the tables of a step's responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mppo.batch.episode import Episode
from mppo.batch.prompt import Prompt
from mppo.batch.shares import bring_ids_to_first
from mppo.recipe.schema import Recipe
from mppo.report.console import SampleRow
from mppo.rollout.engine import GenerationRequest, RolloutEngine, sampling_seed
from mppo.safety.disk import replace_text
from mppo.safety.foreign_text import json_line

if TYPE_CHECKING:
    from mppo.trainer.run import Run


def generate_validation(
    engine: RolloutEngine,
    recipe: Recipe,
    prompts: Sequence[Prompt],
    show: Callable[[int], None] = lambda answered: None,
) -> list[Episode]:
    """Generate ``rollout.val_kwargs.n`` responses to each validation prompt. Collective. The seed
    is the same at every validation, and in ``mppo.evaluate``. ``show`` is called with the number of
    prompts that have been answered."""
    size = recipe.data.val_batch_size or max(len(prompts), 1)
    sampling, longest = recipe.rollout.validation, recipe.data.max_response_length
    seed = sampling_seed(recipe.trainer.seed, step=0)
    found: list[Episode] = []
    for first in range(0, len(prompts), size):
        part = prompts[first : first + size]
        found += engine.generate(GenerationRequest(part, sampling, longest, seed))
        show(first + len(part))
    return found


def sample_lines(episodes: Sequence[Episode], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """One JSON object for each response, with prompt, answer and score, on the first rank; none
    elsewhere. Collective."""
    ids = bring_ids_to_first(episodes)
    return list(_lines(episodes, decoded(tokenizer, ids))) if ids else []


def _lines(episodes: Sequence[Episode], texts: Sequence[str]) -> Iterator[str]:
    samples: dict[int, int] = {}
    for episode, text in zip(episodes, texts, strict=True):
        prompt, score = episode.prompt, episode.scored
        samples[prompt.uid] = sample = samples.get(prompt.uid, -1) + 1
        values = {
            "data_source": prompt.data_source,
            "index": prompt.uid,
            "sample": sample,
            "prompt": prompt.text,
            "response": text,
            "ground_truth": prompt.ground_truth,
            "answer": score.answer,
            "right": score.right,
            "score": score.score,
            "numbers": dict(score.numbers),
            "error": score.error or score.unscored,
            "length": episode.length,
            "finish_reason": episode.finish_reason,
        }
        yield json_line(values) + "\n"


def write_lines(path: Path, lines: Sequence[str]) -> None:
    """Write a JSONL file atomically, and its folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, "".join(lines))


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

"""Generating responses to the validation prompts, and writing them with their scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mppo.batch.episode import Episode
from mppo.batch.prompt import Prompt
from mppo.batch.shares import bring_ids_to_first
from mppo.config.schema import Recipe
from mppo.rollout.engine import GenerationRequest, RolloutEngine, sampling_seed
from mppo.safety.disk import replace_text
from mppo.safety.foreign_text import json_line
from mppo.trainer.validation.samples import decoded


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


def sample_lines(
    episodes: Sequence[Episode],
    tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
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

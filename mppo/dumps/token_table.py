"""The tokens of one dumped sequence with their numbers, for ``mppo-inspect`` and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mppo.dumps.experience_files import read_experience
from mppo.dumps.step_dump import SequenceRow, StepDump, read_pieces
from mppo.safety.redact import HIDDEN, redact_text

_LONGEST = 250
"""Most characters that are shown of a token's text."""


@dataclass(frozen=True)
class TokenTable:
    """A sequence: prompt, response and, where the recipe has one, end slot.

    Args:
        pieces: text of each token; ``***`` where the sequence's text contains a secret.
        by_environment: for each token after the prompt, whether an environment inserted it: then
            it has no loss, and its numbers mean nothing.
        numbers: by name a number for each token after the prompt: ``logprob``, ``rollout_logprob``,
            ``ref_logprob``, ``ratio`` (of the actor's probability before the update to the
            engine's), ``kl`` (log-probability minus the reference's), ``entropy``, ``value``,
            ``reward``, ``advantage``, ``return`` and ``weight``.
    """

    row: SequenceRow
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    prompt_tokens: int
    by_environment: tuple[bool, ...]
    numbers: Mapping[str, tuple[float, ...]]


def read_token_tables(
    folder: Path, header: StepDump, indices: list[int], limit: int | None = None
) -> list[TokenTable]:
    """Read some sequences (ascending indices) of a dumped step, of each at most ``limit`` tokens;
    ValueError, KeyError, TypeError or OSError if the dump is damaged."""
    experience = read_experience(folder, header.ranks, indices)
    pieces = read_pieces(folder, header.ranks)
    old, batch = experience.old, experience.old.batch
    known: dict[str, Tensor] = {
        "logprob": old.logprobs_T,
        "rollout_logprob": batch.rollout_logprobs_T,
        "ref_logprob": old.ref_logprobs_T,
        "ratio": torch.exp(old.logprobs_T - batch.rollout_logprobs_T),
        "kl": old.logprobs_T - old.ref_logprobs_T,
        "entropy": torch.zeros_like(old.logprobs_T) if old.entropy_T is None else old.entropy_T,
        "value": old.values_T,
        "reward": experience.rewards_T,
        "advantage": experience.advantages_T,
        "return": experience.returns_T,
        "weight": experience.loss_weight_T,
    }
    prompts, ends, found = batch.prompt_B.tolist(), batch.cu_seqlens.tolist(), []
    for place, index in enumerate(indices):
        first, last = ends[place], ends[place + 1]
        if limit is not None:
            last = min(last, first + limit)
        tokens = batch.tokens_T[first:last].tolist()
        texts = tuple(pieces.get(token, f"<{token}>") for token in tokens)
        if redact_text("".join(texts)) != "".join(texts):
            texts = (HIDDEN,) * len(texts)
        after = min(first + prompts[index], last)
        numbers = {name: tuple(x_T[after:last].tolist()) for name, x_T in known.items()}
        prompt_tokens = min(prompts[index], last - first)
        row, shown = header.rows[index], tuple(text[:_LONGEST] for text in texts)
        inserted = tuple((batch.value_mask_T[after:last] == 0).tolist())
        found.append(TokenTable(row, tuple(tokens), shown, prompt_tokens, inserted, numbers))
    return found

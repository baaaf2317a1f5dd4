"""Batched generation with a transformers model: prefill, then one token per row and step.

Prompts are padded on the left, so that all responses begin in the same column of the cache.
Finished rows are removed from the batch. Shapes: ``R`` rows, ``P`` prompts, ``V`` vocabulary, ``C``
columns of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from mppo.recipe.sections.rollout import SamplingConfig
from mppo.rollout.local.sampling import draw, uniforms
from mppo.supervision import stop_request
from mppo.supervision.phase import tick

_PREFILL_TOKENS = 16384
"""Tokens of all prompts together in one pass: bounds the memory of activations."""
_UNIFORM_BLOCK = 64
_COMPACT_BELOW = 0.85


@dataclass(frozen=True)
class DecodedRows:
    """Generated rows: int32 and float32 ``[R, T]``; ``stopped_R``: bool, the row ended with a stop
    token."""

    tokens: Tensor
    logprobs: Tensor
    length_R: Tensor
    stopped_R: Tensor

    def responses(self) -> list[tuple[Tensor, Tensor, str]]:
        """Each row's tokens and log-probabilities, on the CPU, and why it ended."""
        columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        valid = columns < self.length_R[:, None]
        lengths = self.length_R.tolist()
        ids, logprobs = (x[valid].cpu().split(lengths) for x in (self.tokens, self.logprobs))
        reasons = ["stop" if stopped else "length" for stopped in self.stopped_R.tolist()]
        return list(zip(ids, logprobs, reasons, strict=True))


class _Rows:
    """The rows that are still being generated, and the results of all rows. ``position_R``: of the
    next token; see ``decode``."""

    def __init__(self, key_R: Tensor, position_R: Tensor, limit_R: Tensor) -> None:
        rows, device, max_tokens = len(key_R), key_R.device, int(limit_R.max())
        self.tokens = torch.zeros(max_tokens, rows, dtype=torch.int32, device=device)
        self.logprobs = torch.zeros(max_tokens, rows, dtype=torch.float32, device=device)
        self.length_R = limit_R.clone()
        self.stopped_R = torch.zeros(rows, dtype=torch.bool, device=device)
        self.position_R = position_R
        self._key_R = key_R
        self._limit_R = limit_R
        self._row_R = torch.arange(rows, device=device)
        self._done_R = self.stopped_R.clone()
        self._uniform = torch.empty(0)

    def draw(self, logits: Tensor, step: int, sampling: SamplingConfig) -> Tensor:
        """Sample and record token ``step`` of every remaining row: int64 ``[rows left]``."""
        if step % _UNIFORM_BLOCK == 0:
            self._uniform = uniforms(self._key_R, step, _UNIFORM_BLOCK)
        uniform_R = self._uniform[:, step % _UNIFORM_BLOCK]
        token_R, logprob_R = draw(logits, uniform_R, sampling)
        self.tokens[step].index_copy_(0, self._row_R, token_R.int())
        self.logprobs[step].index_copy_(0, self._row_R, logprob_R)
        return token_R

    def finish(self, token_R: Tensor, step: int, stop_tokens: Tensor) -> Tensor | None:
        """Record which rows drew a stop token, or reached their limit; return the indices of the
        rows to keep if enough rows have finished that removing them pays, else None."""
        stops_R = (token_R[:, None] == stop_tokens).any(-1) & ~self._done_R
        ends_R = stops_R | ((self._limit_R[self._row_R] == step + 1) & ~self._done_R)
        if not bool(ends_R.any()):
            return None
        self.length_R[self._row_R[stops_R]] = step + 1
        self.stopped_R[self._row_R[stops_R]] = True
        self._done_R |= ends_R
        alive = (~self._done_R).nonzero()[:, 0]
        return None if len(alive) > _COMPACT_BELOW * len(self._row_R) else alive

    def advance(self) -> None:
        """Go to the next position; finished rows stay, so that none leaves the model's table."""
        self.position_R = self.position_R + ~self._done_R

    def keep(self, alive: Tensor) -> None:
        self._row_R, self._key_R = self._row_R[alive], self._key_R[alive]
        self.position_R, self._uniform = self.position_R[alive], self._uniform[alive]
        self._done_R = self._done_R[alive]


def _prefill(
    model: PreTrainedModel, prompts: Sequence[Tensor], cache: DynamicCache, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Fill the cache with the prompts: last logits ``[P, V]``, and int64 ``[P, C]``, 1 in columns
    that hold a token."""
    shape = len(prompts), max(len(prompt) for prompt in prompts)
    ids, seen = torch.zeros(2, *shape, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, -len(prompt) :] = prompt
        seen[row, -len(prompt) :] = 1
    ids, seen = ids.to(device), seen.to(device)
    position = (seen.cumsum(-1) - 1).clamp(min=0)
    logits = torch.empty(0)
    width = max(1, _PREFILL_TOKENS // len(prompts))
    for begin in range(0, shape[1], width):
        end = min(begin + width, shape[1])
        logits = model(
            input_ids=ids[:, begin:end],
            attention_mask=seen[:, :end],
            position_ids=position[:, begin:end],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
    return logits, seen


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    parent_R: Sequence[int],
    key_R: Tensor,
    sampling: SamplingConfig,
    limit_R: Tensor,
    stop_tokens: Tensor,
) -> DecodedRows:
    """Generate one response per row, on the model's device, in row order.

    Args:
        model: causal LM in eval mode.
        prompts: P one-dimensional tensors of token ids, shortest first, none empty.
        parent_R: index of each row's prompt; every prompt is prefilled once.
        key_R: int64 ``[R]``, key of each row's random stream.
        limit_R: int64 ``[R]``, most generated tokens of each row.
        stop_tokens: int64 ``[S]``.
    """
    max_tokens = int(limit_R.max())
    cache = DynamicCache(config=model.config)
    logits, seen = _prefill(model, prompts, cache, key_R.device)
    # samples of one prompt share its prefill: their rows are copies of the prompt's
    parents = torch.tensor(parent_R, device=key_R.device)
    cache.batch_select_indices(parents)
    logits, seen = logits[parents], seen[parents]
    rows = _Rows(key_R, seen.sum(-1), limit_R)
    for step in range(max_tokens):
        stop_request.raise_if_due()
        tick()
        token_R = rows.draw(logits, step, sampling)
        alive = rows.finish(token_R, step, stop_tokens)
        if alive is not None:
            if len(alive) == 0:
                break
            rows.keep(alive)
            cache.batch_select_indices(alive)
            token_R, seen = token_R[alive], seen[alive]
        if step + 1 == max_tokens:
            break
        seen = torch.cat([seen, seen.new_ones(len(seen), 1)], 1)
        logits = model(
            input_ids=token_R[:, None],
            position_ids=rows.position_R[:, None],
            past_key_values=cache,
            attention_mask=seen,
            use_cache=True,
        ).logits[:, -1]
        rows.advance()
    return DecodedRows(rows.tokens.T, rows.logprobs.T, rows.length_R, rows.stopped_R)

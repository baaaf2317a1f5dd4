"""Batched generation with a transformers model: prefill, then one token per row and step.

Prompts are padded on the right, so causal attention needs no mask in prefill. All responses begin
in the same cache column; decoding masks the gap between a row's prompt and that column
(``mppo.rollout.local.row_attention``). Finished rows are removed from the batch. Shapes: ``R``
rows, ``P`` prompts, ``V`` vocabulary, ``C`` cache columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from mppo.config.sections.rollout import SamplingConfig
from mppo.rollout.local.row_attention import ColumnPositions
from mppo.rollout.local.sampling import draw, uniforms
from mppo.supervision import stop_request
from mppo.supervision.phase import tick

_PREFILL_TOKENS = 16384
_GROWTH_COLUMNS = 256
_UNIFORM_BLOCK = 64
_COMPACT_BELOW = 0.85
_ROW_MULTIPLE = 8
"""Row counts are rounded up to this: oneDNN compiles a kernel for every different row count."""


class RowCache(Cache):
    """Keys and values in buffers that grow by blocks, so that a step writes only one column.

    Args:
        rows: rows of the buffers.
        layers: attention layers of the model.
        columns: initial capacity.
    """

    def __init__(self, rows: int, layers: int, columns: int) -> None:
        super().__init__(layers=[])
        self._rows = rows
        self._buffers: list[list[Tensor] | None] = [None] * layers
        self.columns = columns
        self.length = 0
        self.window = slice(0, rows)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns filled."""
        return self.length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **_: object
    ) -> tuple[Tensor, Tensor]:
        """Store new states and return what to attend to: in prefill only the new states.

        Prefill writes only the rows of ``window``.
        """
        buffers = self._buffers[layer_idx]
        if buffers is None:
            # zeros: a NaN in a masked column would survive the multiplication by zero
            buffers = self._buffers[layer_idx] = [
                s.new_zeros(self._rows, s.shape[1], self.columns, s.shape[3])
                for s in (key_states, value_states)
            ]
        end = self.length + key_states.shape[2]
        for buffer, states in zip(buffers, (key_states, value_states), strict=True):
            buffer[self.window, :, self.length : end] = states
        if self.length == 0:
            return key_states, value_states
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def reshape(self, parent_R: Tensor | None, columns: int) -> None:
        """Select or repeat rows, and change the capacity.

        Args:
            parent_R: int64 ``[R]``, the old row of each new row; None: keep all rows.
            columns: new capacity.
        """
        for buffers in self._buffers:
            assert buffers is not None, "a layer without keys"
            for index, old in enumerate(buffers):
                rows = len(old) if parent_R is None else len(parent_R)
                new = old.new_empty(rows, old.shape[1], columns, old.shape[3])
                kept = old[:, :, : self.length]
                new[:, :, : self.length] = kept if parent_R is None else kept[parent_R]
                buffers[index] = new
                self._rows = rows
        self.columns = columns
        self.window = slice(0, self._rows)


@dataclass(frozen=True)
class DecodedRows:
    """Generated rows.

    Args:
        tokens: int32 ``[R, T]``, each row valid up to its length.
        logprobs: float32 ``[R, T]``.
        length_R: int64 ``[R]``.
        stopped_R: bool ``[R]``, the row ended with a stop token.
    """

    tokens: Tensor
    logprobs: Tensor
    length_R: Tensor
    stopped_R: Tensor


def _prefill_slices(lengths: Sequence[int]) -> list[slice]:
    """Divide length-sorted prompts into prefill batches of bounded size with little padding."""
    slices, start = [], 0
    for index, length in enumerate(lengths):
        full = (index - start + 1) * length > _PREFILL_TOKENS
        uneven = length > 1.5 * lengths[start] + 16
        if index > start and (full or uneven):
            slices.append(slice(start, index))
            start = index
    return [*slices, slice(start, len(lengths))]


def _prefill(
    model: PreTrainedModel, prompts: Sequence[Tensor], cache: RowCache, device: torch.device
) -> Tensor:
    """Fill the cache with prompts (shortest first); return the last logits: ``[P, V]``."""
    lengths = [len(prompt) for prompt in prompts]
    logits = []
    for part in _prefill_slices(lengths):
        width = lengths[part.stop - 1]
        padded = torch.zeros(part.stop - part.start, width, dtype=torch.int64)
        for row, prompt in enumerate(prompts[part]):
            padded[row, : len(prompt)] = prompt
        last_P = torch.tensor(lengths[part], device=device) - 1
        row_P = torch.arange(len(last_P), device=device)

        def pick_last(_: nn.Module, args: tuple, row_P=row_P, last_P=last_P) -> tuple[Tensor]:
            return (args[0][row_P, last_P][:, None],)

        # the head computes logits of the last positions only
        head = model.get_output_embeddings()
        assert head is not None, "a causal LM has a head"
        hook = head.register_forward_pre_hook(pick_last)
        cache.window, cache.length = part, 0
        try:
            out = model(
                input_ids=padded.to(device),
                position_ids=torch.arange(width, device=device)[None],
                past_key_values=cache,
                use_cache=True,
            )
        finally:
            hook.remove()
        logits.append(out.logits[:, 0])
    cache.length = lengths[-1]
    return torch.cat(logits)


class _Rows:
    """The rows that are still being generated, and the results of all rows.

    Args:
        key_R: int64 ``[R]``, key of each row's random stream.
        position_R: int64 ``[R]``, position of the next token.
        columns: visible cache columns of each row.
        limit_R: int64 ``[R]``, most generated tokens of each row.
    """

    def __init__(
        self, key_R: Tensor, position_R: Tensor, columns: ColumnPositions, limit_R: Tensor
    ) -> None:
        rows, device, max_tokens = len(key_R), key_R.device, int(limit_R.max())
        self.tokens = torch.zeros(max_tokens, rows, dtype=torch.int32, device=device)
        self.logprobs = torch.zeros(max_tokens, rows, dtype=torch.float32, device=device)
        self.length_R = limit_R.clone()
        self.stopped_R = torch.zeros(rows, dtype=torch.bool, device=device)
        self.position_R, self.columns = position_R, columns
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
        """Record which rows drew a stop token, or reached their limit.

        Returns:
            Indices of the rows to keep, possibly none, if enough rows have finished that removing
            them pays; else None. Includes some finished rows, see ``_ROW_MULTIPLE``.
        """
        stops_R = (token_R[:, None] == stop_tokens).any(-1) & ~self._done_R
        ends_R = stops_R | ((self._limit_R[self._row_R] == step + 1) & ~self._done_R)
        if not bool(ends_R.any()):
            return None
        self.length_R[self._row_R[stops_R]] = step + 1
        self.stopped_R[self._row_R[stops_R]] = True
        self._done_R |= ends_R
        alive, done = ((self._done_R == ended).nonzero()[:, 0] for ended in (False, True))
        if len(alive) > _COMPACT_BELOW * len(self._row_R):
            return None
        return torch.cat([alive, done[: -len(alive) % _ROW_MULTIPLE]])

    def advance(self) -> None:
        """Go to the next position; finished rows stay, so that none leaves the model's table."""
        self.position_R = self.position_R + ~self._done_R

    def keep(self, alive: Tensor) -> None:
        """Drop every row not in ``alive``."""
        self._row_R, self._key_R = self._row_R[alive], self._key_R[alive]
        self.position_R, self._uniform = self.position_R[alive], self._uniform[alive]
        self._done_R = self._done_R[alive]
        self.columns.keep(alive)

    def responses(self) -> DecodedRows:
        """All recorded rows."""
        return DecodedRows(self.tokens.T, self.logprobs.T, self.length_R, self.stopped_R)


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    parent_R: Sequence[int],
    key_R: Tensor,
    sampling: SamplingConfig,
    limit_R: Tensor,
    stop_tokens: Tensor,
    window: int | None = None,
) -> DecodedRows:
    """Generate one response per row.

    Args:
        model: causal LM in eval mode whose attention is ``row_attention``.
        prompts: P one-dimensional tensors of token ids, shortest first, none empty.
        parent_R: index of each row's prompt; every prompt is prefilled once.
        key_R: int64 ``[R]`` on the model's device, key of each row's random stream.
        sampling: sampling parameters.
        limit_R: int64 ``[R]`` on the model's device, most generated tokens of each row.
        stop_tokens: int64 ``[S]`` on the model's device.
        window: tokens visible to a token, itself included, in layers with a sliding window.

    Returns:
        DecodedRows in row order, on the model's device.
    """
    device, begin, max_tokens = key_R.device, len(prompts[-1]), int(limit_R.max())
    cache = RowCache(len(prompts), model.config.num_hidden_layers, begin)
    logits = _prefill(model, prompts, cache, device)
    # samples of one prompt share its prefill: their rows are copies of the prompt's
    parents = torch.tensor(parent_R, device=device)
    cache.reshape(parents, begin + min(max_tokens, _GROWTH_COLUMNS))
    logits = logits[parents]
    length_R = torch.tensor([len(p) for p in prompts], device=device)[parents]
    columns = ColumnPositions(length_R, begin, begin + max_tokens, window, logits.dtype)
    rows = _Rows(key_R, length_R, columns, limit_R)
    for step in range(max_tokens):
        stop_request.raise_if_due()
        tick()
        token_R = rows.draw(logits, step, sampling)
        alive = rows.finish(token_R, step, stop_tokens)
        if alive is not None:
            if len(alive) == 0:
                break
            rows.keep(alive)
            cache.reshape(alive, cache.columns)
            token_R = token_R[alive]
        if step + 1 == max_tokens:
            break
        # grow by half: every growth copies the cache
        if cache.length == cache.columns:
            cache.reshape(None, min(cache.columns * 3 // 2 + 1, begin + max_tokens))
        logits = model(
            input_ids=token_R[:, None],
            position_ids=rows.position_R[:, None],
            past_key_values=cache,
            attention_mask=columns.all_seen(cache.length + 1),
            window_columns=columns.window_seen(cache.length + 1),
            use_cache=True,
        ).logits[:, -1]
        cache.length += 1
        rows.advance()
    return rows.responses()

"""Packing episodes into a batch: their tokens end to end on one axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mppo.algos.token_axis import cumulative
from mppo.batch.batch import Batch, no_token_rewards
from mppo.batch.episode import NO_WEIGHTS, Episode
from mppo.safety.input_error import InputError


def pack_episodes(
    episodes: Sequence[Episode], end_slots_below: int = 0, bootstraps: bool = False
) -> Batch:
    """Concatenate the episodes that this rank holds on one token axis; no sequence has a home.

    Args:
        episodes: all, at least one; they may have no tokens. One without a score scores 0.
        end_slots_below: append an end slot (``Batch.end_mask_T``) to every response that stopped
            with fewer tokens than this.
        bootstraps: append one to every response that was cut off by its length.
    """
    if not episodes:
        raise InputError("a batch needs at least one episode")
    owner_B = [number for number, each in enumerate(episodes) for _ in each.sequences]
    sequences = [each for episode in episodes for each in episode.sequences]
    stopped_B = torch.tensor([each.finish_reason == "stop" for each in sequences])
    prompt_B = torch.tensor([len(each.prompt.token_ids) for each in sequences])
    answer_B = torch.tensor([each.length for each in sequences])
    inserted_B = torch.tensor([each.inserted for each in sequences])
    # the end slot repeats the last token; mask, log-probability and version mark it as unread
    cut_B = torch.tensor([bootstraps and each.finish_reason == "length" for each in sequences])
    slots_B = ((answer_B > 0) & (cut_B | (stopped_B & (answer_B < end_slots_below)))).long()
    # every sequence is a run of prompt tokens, one of answer tokens and one of its end slot
    runs_B = torch.stack([prompt_B, answer_B, slots_B], 1)
    scores = [0.0 if each.score is None else each.score.score for each in episodes]
    held = [each for each in sequences if each.tokens is not None]
    numbers = [number for number, each in enumerate(sequences) if each.tokens is not None]
    held_H = torch.tensor(numbers, dtype=torch.int64)
    prompt_H, answer_H, slots_H = runs_B[held_H].unbind(1)
    lengths_H = runs_B[held_H].sum(1)
    cu_seqlens = cumulative(lengths_H)
    slots = slots_H.tolist()
    tokens, answer = int(cu_seqlens[-1]), cu_seqlens[:-1] + prompt_H
    mask_T = _ones_at(tokens, answer, answer_H)
    _clear_inserted(mask_T, held, answer.tolist())
    return Batch(
        tokens_T=_concatenate_tokens(held, slots),
        cu_seqlens=cu_seqlens,
        response_mask_T=mask_T,
        rollout_logprobs_T=_concatenate_logprobs(held, slots),
        group_B=torch.tensor([each.prompt.uid for each in sequences], dtype=torch.int64),
        episode_B=torch.tensor(owner_B),
        scores_B=torch.tensor([scores[owner] for owner in owner_B], dtype=torch.float32),
        truncated_B=~stopped_B,
        weight_version_T=_expand_versions(held, slots),
        routed_experts_T=_concatenate_routing(held, lengths_H.tolist()),
        end_mask_T=_ones_at(tokens, answer + answer_H, slots_H),
        held_H=held_H,
        lengths_B=runs_B.sum(1),
        response_B=answer_B - inserted_B,
        end_B=slots_B,
        inserted_B=inserted_B,
        home_B=torch.full((len(sequences),), -1, dtype=torch.int32),
        token_rewards_T=_spread_rewards(held, mask_T, answer.tolist()),
    )


def _ones_at(tokens: int, starts: Tensor, counts: Tensor) -> Tensor:
    """A mask: 1 on ``counts`` tokens from each start, 0 elsewhere."""
    mask_T = torch.zeros(tokens)
    inside = mask_T.numpy()
    for start, end in zip(starts.tolist(), (starts + counts).tolist(), strict=True):
        inside[start:end] = 1.0
    return mask_T


def _clear_inserted(mask_T: Tensor, held: Sequence[Episode], starts: Sequence[int]) -> None:
    """Clear a mask on the tokens of environments, in place; ``starts`` are after the prompts."""
    for episode, start in zip(held, starts, strict=True):
        for version, count in episode.parts:
            if version == NO_WEIGHTS:
                mask_T[start : start + count] = 0.0
            start += count


def _spread_rewards(held: Sequence[Episode], mask_T: Tensor, starts: Sequence[int]) -> Tensor:
    """``Batch.token_rewards_T`` of episodes, whose tokens after the prompt begin at ``starts``. The
    reward of an environment's token belongs to the response token before it, whose effect it is."""
    rewards = [() if each.score is None else each.score.token_rewards for each in held]
    if not any(map(len, rewards)):
        return no_token_rewards(mask_T)
    spread_T = torch.zeros(len(mask_T))
    for found, start in zip(rewards, starts, strict=True):
        span = slice(start, start + len(found))
        places = torch.where(mask_T[span] > 0, torch.arange(len(found)), 0).cummax(0).values
        values = torch.from_numpy(np.asarray(found, dtype=np.float32))
        spread_T[span].index_add_(0, places, values)
    return spread_T


def _concatenate_tokens(held: Sequence[Episode], slots: Sequence[int]) -> Tensor:
    parts = [np.empty(0, dtype=np.int32)]
    for episode, count in zip(held, slots, strict=True):
        response = episode.here.ids.numpy()
        parts += [episode.prompt.token_ids.numpy(), response]
        if count:
            parts.append(response[-1:])
    tokens_T = torch.empty(sum(map(len, parts)), dtype=torch.int64)
    np.concatenate(parts, out=tokens_T.numpy())  # converts while it copies
    return tokens_T


def _concatenate_logprobs(held: Sequence[Episode], slots: Sequence[int]) -> Tensor:
    zeros = torch.zeros(1 + max((len(each.prompt.token_ids) for each in held), default=0))
    parts = [zeros[:0]]
    for episode, count in zip(held, slots, strict=True):
        parts += [zeros[: len(episode.prompt.token_ids)], episode.here.logprobs, zeros[:count]]
    return torch.cat(parts)


def _expand_versions(held: Sequence[Episode], slots: Sequence[int]) -> Tensor:
    runs: list[tuple[int, int]] = []
    for episode, count in zip(held, slots, strict=True):
        prompt = NO_WEIGHTS, len(episode.prompt.token_ids)
        runs += [prompt, *episode.parts, (NO_WEIGHTS, count)]
    version_T = torch.empty(sum(tokens for _, tokens in runs), dtype=torch.int64)
    values, start = version_T.numpy(), 0
    for version, tokens in runs:
        values[start : start + tokens] = version
        start += tokens
    return version_T


def _concatenate_routing(held: Sequence[Episode], lengths: Sequence[int]) -> Tensor:
    """``Batch.routed_experts_T`` of episodes, whose sequences have these lengths."""
    found = [each.here.experts for each in held]
    shape = next((x.shape[1:] for x in found if x is not None), None)
    lacking = any(x is None and each.length for x, each in zip(found, held, strict=True))
    if shape is None or lacking:
        return torch.empty(sum(lengths), 0, 0, dtype=torch.int16)
    rows: list[Tensor] = []
    for experts, length in zip(found, lengths, strict=True):
        known = torch.empty(0, *shape) if experts is None else experts
        rows += [
            known.to(torch.int16),
            known.new_full((length - len(known), *shape), -1).to(torch.int16),
        ]
    return torch.cat(rows)

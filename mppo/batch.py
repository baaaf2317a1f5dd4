"""The values that the stages of a PPO iteration pass on.

Prompt -> Trajectory -> Batch -> ModelOutputs -> Experience. Each type holds the one before it; no
stage adds a field to its argument.

Shapes: ``T`` tokens of all sequences, concatenated without padding; ``B`` sequences.
``cu_seqlens`` has ``B + 1`` entries; sequence ``b`` is ``tokens_T[cu_seqlens[b]:cu_seqlens[b+1]]``.
Index ``t`` of a tensor belongs to token ``t``: its log-probability given all tokens before it, the
value of the state before it, its mask. Outside ``response_mask_T`` every per-token float is 0,
except that values and rewards may also be nonzero on end slots.
A Batch is the global batch: every rank holds the same one, on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor


class _ComparedByValue:
    """Dataclasses with tensors are equal if all fields are; tensors are compared as a whole."""

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # pyright: ignore[reportArgumentType]  # subclasses are dataclasses

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # Python's way to say: not hashable

    def _convert(self, name: str, dtype: torch.dtype) -> None:
        """Make a field a tensor of this dtype on the CPU."""
        given = getattr(self, name)
        if not isinstance(given, Tensor) or given.dtype != dtype:
            object.__setattr__(self, name, torch.as_tensor(given, dtype=dtype))


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or torch.equal(a, b)
    return a == b


@dataclass(frozen=True, eq=False)
class Prompt(_ComparedByValue):
    """One prompt, tokenised.

    Args:
        uid: position in the data order, unique within a run; samples of one prompt share it.
        token_ids: int32 ``[P]``, prompt tokens after chat template, filtering and truncation. Any
            sequence of integers is converted.
        data_source: name of the task or data set; selects the verifier.
        ground_truth: the reference answer for the verifier.
        text: the prompt as text, for tables.
        extra: other columns of the data row.
        messages: the conversation, with ``role`` and ``content`` in each message; empty if the
            prompt is rendered without a chat template.
    """

    uid: int
    token_ids: Tensor
    data_source: str
    ground_truth: str
    text: str
    extra: dict = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        self._convert("token_ids", torch.int32)


@dataclass(frozen=True, eq=False)
class Trajectory(_ComparedByValue):
    """One sampled response.

    Args:
        prompt: the prompt.
        response_ids: int32 ``[L]``, generated tokens, the stop token included when one was
            generated. This and ``logprobs`` may be any sequence, which is converted.
        logprobs: float32 ``[L]``, log-probability of each response token under the distribution it
            was sampled from, before top-p/top-k/min-p truncation: softmax(logits / temperature).
        finish_reason: "stop" (a stop token was generated), "length" or "abort".
        weight_version: version of the weights that generated the response, or its last part.
        routed_experts: int16 ``[tokens, layers, k]``, experts chosen by the engine's routers for
            the first tokens of prompt and response (the last generated token is never routed);
            None if the engine does not report them.
        earlier: (version, number of tokens) of the parts before the last one, in order.
    """

    prompt: Prompt
    response_ids: Tensor
    logprobs: Tensor
    finish_reason: str
    weight_version: int
    routed_experts: Tensor | None = None
    earlier: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        self._convert("response_ids", torch.int32)
        self._convert("logprobs", torch.float32)

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(version, number of tokens) of all parts, in order."""
        before = sum(tokens for _, tokens in self.earlier)
        return (*self.earlier, (self.weight_version, len(self.response_ids) - before))

    @property
    def weight_versions(self) -> Tensor:
        """Weight version of each response token: int64 ``[L]``."""
        version, count = torch.tensor(self.parts).T
        return version.repeat_interleave(count)


ResponsesBySample = dict[tuple[int, int], Trajectory]
"""Responses by prompt uid and sample number."""


@dataclass
class PartialResponses:
    """Responses that no step has trained on yet; the same on every rank.

    A response is kept because it was aborted when a batch was full, because other samples of its
    prompt are missing, or because it was generated ahead. The run owns these responses: engines
    read them and return the ones they did not use.

    Args:
        responses: by prompt uid and sample number.
    """

    responses: ResponsesBySample = field(default_factory=dict)


_DEFAULT = torch.empty(0)
"""Default of a tensor field whose true default depends on the number of tokens."""


@dataclass(frozen=True)
class Batch:
    """Scored trajectories on one flat token axis.

    Args:
        tokens_T: int64 ``[T]``.
        cu_seqlens: int64 ``[B + 1]``.
        response_mask_T: float32 ``[T]``, 1 on response tokens.
        rollout_logprobs_T: float32 ``[T]``, the engine's log-probabilities.
        group_B: int64 ``[B]``, uid of the prompt.
        scores_B: float32 ``[B]``, the outcome reward of each trajectory.
        truncated_B: bool ``[B]``, not ended by a stop token.
        weight_version_T: int64 ``[T]``, of the weights that generated each token; -1 elsewhere.
        routed_experts_T: int16 ``[T, layers, k]``, experts chosen by the engine, by decoder layer;
            -1 where unknown. ``[T, 0, 0]`` (default) if the engine does not report them.
        end_mask_T: float32 ``[T]``, 1 on an end slot: a position after a response's stop token, for
            the terminal state, which has a value but no action. Zeros (default) without end slots.
    """

    tokens_T: Tensor
    cu_seqlens: Tensor
    response_mask_T: Tensor
    rollout_logprobs_T: Tensor
    group_B: Tensor
    scores_B: Tensor
    truncated_B: Tensor
    weight_version_T: Tensor
    routed_experts_T: Tensor = _DEFAULT
    end_mask_T: Tensor = _DEFAULT

    def __post_init__(self) -> None:
        if self.routed_experts_T is _DEFAULT:
            nothing = torch.empty(len(self.tokens_T), 0, 0, dtype=torch.int16)
            object.__setattr__(self, "routed_experts_T", nothing)
        if self.end_mask_T is _DEFAULT:
            object.__setattr__(self, "end_mask_T", torch.zeros_like(self.response_mask_T))

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def value_mask_T(self) -> Tensor:
        """1 on response tokens and end slots, where states have values: float32 ``[T]``."""
        return self.response_mask_T + self.end_mask_T

    @property
    def lengths_B(self) -> Tensor:
        """Number of tokens of each sequence, end slot included: int64 ``[B]``."""
        return self.cu_seqlens.diff()


@dataclass(frozen=True)
class ModelOutputs:
    """A batch with the models' outputs before any update.

    Args:
        batch: the batch.
        logprobs_T: the policy's log-probabilities, float32 ``[T]``: the actor's, or in bypass mode
            the engine's.
        ref_logprobs_T: the reference's log-probabilities, float32 ``[T]``; equal to ``logprobs_T``
            without a reference model.
        values_T: the critic's value of the state before token t, float32 ``[T]``; zeros without a
            critic.
        has_actor_logprobs: whether ``logprobs_T`` are the actor's.
        full_kl_T: KL of actor against reference over the vocabulary, float32 ``[T]`` (nats);
            zeros (None) if the recipe does not use it.
        ref_hidden_T: the reference's hidden states that predict token t, ``[T, hidden]`` in the
            model's dtype; ``[T, 0]`` (None) if the actor's loss does not use them.
    """

    batch: Batch
    logprobs_T: Tensor
    ref_logprobs_T: Tensor
    values_T: Tensor
    has_actor_logprobs: bool = True
    full_kl_T: Tensor | None = None
    ref_hidden_T: Tensor | None = None

    def __post_init__(self) -> None:
        if self.full_kl_T is None:
            object.__setattr__(self, "full_kl_T", torch.zeros_like(self.logprobs_T))
        if self.ref_hidden_T is None:
            object.__setattr__(self, "ref_hidden_T", torch.empty(len(self.logprobs_T), 0))


@dataclass(frozen=True)
class Experience:
    """The training data of the update stage.

    Args:
        old: the batch with the models' outputs before the update.
        rewards_T: per-token rewards, including the KL penalty if the recipe uses one, float32
            ``[T]``.
        advantages_T: float32 ``[T]``.
        returns_T: the critic's regression target, float32 ``[T]``.
        loss_weight_T: float32 ``[T]``; response mask times any importance weight or rejection.
    """

    old: ModelOutputs
    rewards_T: Tensor
    advantages_T: Tensor
    returns_T: Tensor
    loss_weight_T: Tensor


def pack_trajectories(
    trajectories: Sequence[Trajectory], scores: Sequence[float], end_slots_below: int = 0
) -> Batch:
    """Concatenate trajectories on one token axis.

    Args:
        trajectories: B trajectories; responses may be empty.
        scores: B outcome rewards.
        end_slots_below: append an end slot (``Batch.end_mask_T``) to every response that stopped
            with fewer tokens than this. The slot repeats the stop token, which nothing reads.
            0: no end slots.

    Returns:
        Batch on the CPU.

    Raises:
        ValueError: no trajectory, or the numbers of trajectories and scores differ.
    """
    if not trajectories or len(trajectories) != len(scores):
        raise ValueError(
            f"a batch needs at least one trajectory and one score for each: got "
            f"{len(trajectories)} trajectories and {len(scores)} scores"
        )
    stopped_B = torch.tensor([t.finish_reason == "stop" for t in trajectories])
    prompt_B = torch.tensor([len(t.prompt.token_ids) for t in trajectories])
    response_B = torch.tensor([len(t.response_ids) for t in trajectories])
    # the end slot repeats the stop token; mask, log-probability and version mark it as unread
    slots_B = (stopped_B & (response_B > 0) & (response_B < end_slots_below)).long()
    lengths_B = prompt_B + response_B + slots_B
    cu_seqlens = torch.zeros(len(trajectories) + 1, dtype=torch.int64)
    cu_seqlens[1:] = lengths_B.cumsum(0)
    slots = slots_B.tolist()
    # every sequence is a run of prompt tokens, one of response tokens and one of its end slot
    runs = torch.stack([prompt_B, response_B, slots_B], 1).flatten()
    kinds = torch.arange(3, dtype=torch.int8).repeat(len(trajectories)).repeat_interleave(runs)
    return Batch(
        tokens_T=_concatenate_tokens(trajectories, slots),
        cu_seqlens=cu_seqlens,
        response_mask_T=(kinds == 1).float(),
        rollout_logprobs_T=_concatenate_logprobs(trajectories, slots),
        group_B=torch.tensor([t.prompt.uid for t in trajectories], dtype=torch.int64),
        scores_B=torch.tensor(scores, dtype=torch.float32),
        truncated_B=~stopped_B,
        weight_version_T=_expand_versions(trajectories, slots),
        routed_experts_T=_concatenate_routing(trajectories, lengths_B.tolist()),
        end_mask_T=(kinds == 2).float(),
    )


def _concatenate_tokens(trajectories: Sequence[Trajectory], slots: Sequence[int]) -> Tensor:
    """``Batch.tokens_T`` of trajectories with these numbers of end slots."""
    parts: list[Tensor] = []
    for trajectory, count in zip(trajectories, slots, strict=True):
        parts += [trajectory.prompt.token_ids, trajectory.response_ids]
        if count:
            parts.append(trajectory.response_ids[-1:])
    return torch.cat(parts).long()


def _concatenate_logprobs(trajectories: Sequence[Trajectory], slots: Sequence[int]) -> Tensor:
    """``Batch.rollout_logprobs_T`` of trajectories with these numbers of end slots."""
    zeros = torch.zeros(1 + max(len(t.prompt.token_ids) for t in trajectories))
    parts: list[Tensor] = []
    for trajectory, count in zip(trajectories, slots, strict=True):
        parts += [zeros[: len(trajectory.prompt.token_ids)], trajectory.logprobs, zeros[:count]]
    return torch.cat(parts)


def _expand_versions(trajectories: Sequence[Trajectory], slots: Sequence[int]) -> Tensor:
    """``Batch.weight_version_T`` of trajectories with these numbers of end slots."""
    runs: list[tuple[int, int]] = []
    for trajectory, count in zip(trajectories, slots, strict=True):
        runs += [(-1, len(trajectory.prompt.token_ids)), *trajectory.parts, (-1, count)]
    version, tokens = torch.tensor(runs).T
    return version.repeat_interleave(tokens)


def _concatenate_routing(trajectories: Sequence[Trajectory], lengths: Sequence[int]) -> Tensor:
    """``Batch.routed_experts_T`` of trajectories, whose sequences have these lengths."""
    reported = [t.routed_experts for t in trajectories if t.routed_experts is not None]
    if len(reported) < len(trajectories):
        return _DEFAULT
    rows: list[Tensor] = []
    for experts, length in zip(reported, lengths, strict=True):
        missing = experts.new_full((length - len(experts), *experts.shape[1:]), -1)
        rows += [experts.to(torch.int16), missing.to(torch.int16)]
    return torch.cat(rows)

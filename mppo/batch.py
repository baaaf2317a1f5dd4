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

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised.

    Args:
        uid: position in the data order, unique within a run; samples of one prompt share it.
        token_ids: prompt tokens, after chat template, filtering and truncation.
        data_source: name of the task or data set; selects the verifier.
        ground_truth: the reference answer for the verifier.
        text: the prompt as text, for tables.
        extra: other columns of the data row.
    """

    uid: int
    token_ids: tuple[int, ...]
    data_source: str
    ground_truth: str
    text: str
    extra: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Trajectory:
    """One sampled response.

    Args:
        prompt: the prompt.
        response_ids: generated tokens, the stop token included when one was generated.
        logprobs: log-probability of each response token under the distribution it was sampled
            from, before top-p/top-k/min-p truncation: softmax(logits / temperature).
        finish_reason: "stop" (a stop token was generated), "length" or "abort".
        weight_version: version of the weights that generated the response, or its last part.
        routed_experts: int16 ``[tokens, layers, k]``, experts chosen by the engine's routers for
            the first tokens of prompt and response (the last generated token is never routed);
            None if the engine does not report them.
        earlier: (version, number of tokens) of the parts before the last one, in order.
    """

    prompt: Prompt
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    weight_version: int
    routed_experts: Tensor | None = None
    earlier: tuple[tuple[int, int], ...] = ()

    @property
    def weight_versions(self) -> list[int]:
        """Weight version of each response token."""
        before = [version for version, tokens in self.earlier for _ in range(tokens)]
        return before + [self.weight_version] * (len(self.response_ids) - len(before))


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
    tokens: list[int] = []
    mask: list[float] = []
    end_mask: list[float] = []
    logprobs: list[float] = []
    versions: list[int] = []
    lengths: list[int] = []
    # Python lists are extended and converted once: one tensor per trajectory would be slower
    for trajectory in trajectories:
        prompt_len, response_len = len(trajectory.prompt.token_ids), len(trajectory.response_ids)
        tokens += trajectory.prompt.token_ids
        tokens += trajectory.response_ids
        mask += [0.0] * prompt_len + [1.0] * response_len
        logprobs += [0.0] * prompt_len
        logprobs += trajectory.logprobs
        versions += [-1] * prompt_len + trajectory.weight_versions
        stopped = trajectory.finish_reason == "stop"
        # the end slot repeats the stop token; mask, log-probability and version mark it as unread
        slots = int(stopped and 0 < response_len < end_slots_below)
        tokens += trajectory.response_ids[-1:] * slots
        mask += [0.0] * slots
        logprobs += [0.0] * slots
        versions += [-1] * slots
        end_mask += [0.0] * (prompt_len + response_len) + [1.0] * slots
        lengths.append(prompt_len + response_len + slots)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    cu_seqlens[1:] = torch.tensor(lengths).cumsum(0)
    return Batch(
        tokens_T=torch.tensor(tokens, dtype=torch.int64),
        cu_seqlens=cu_seqlens,
        response_mask_T=torch.tensor(mask, dtype=torch.float32),
        rollout_logprobs_T=torch.tensor(logprobs, dtype=torch.float32),
        group_B=torch.tensor([t.prompt.uid for t in trajectories], dtype=torch.int64),
        scores_B=torch.tensor(scores, dtype=torch.float32),
        truncated_B=torch.tensor([t.finish_reason != "stop" for t in trajectories]),
        weight_version_T=torch.tensor(versions, dtype=torch.int64),
        routed_experts_T=_concatenate_routing(trajectories, lengths),
        end_mask_T=torch.tensor(end_mask, dtype=torch.float32),
    )


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

"""The values that the stages of a PPO iteration pass on.

Prompt -> Trajectory -> Batch -> ModelOutputs -> Experience. Each type holds the one before it; no
stage adds a field to its argument.

Shapes: ``T`` tokens of all sequences, concatenated without padding; ``B`` sequences.
``cu_seqlens`` has ``B + 1`` entries; sequence ``b`` is ``tokens_T[cu_seqlens[b]:cu_seqlens[b+1]]``.
Index ``t`` of a tensor belongs to token ``t``: its log-probability given all tokens before it, the
value of the state before it, its mask. Outside ``response_mask_T`` every per-token float is 0,
except that values and rewards may also be nonzero on end slots.

A batch is shared out over the ranks, on the CPU. Tensors ``[B]`` are those of all sequences, the
same on every rank. Tensors ``[T]`` and ``cu_seqlens`` are those of the ``H`` sequences that this
rank holds, in ascending order of their indices in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

NO_WEIGHTS = -1
"""The weight version of tokens that no weights generated: prompts, and an environment's tokens."""
OPEN = "open"
"""The finish reason of a conversation that an environment has answered, and that goes on."""


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
        verifier: the verifier of the prompt's source; None: that of the recipe or data source.
        messages: the conversation, with ``role`` and ``content`` in each message; empty if the
            prompt is rendered without a chat template.
    """

    uid: int
    token_ids: Tensor
    data_source: str
    ground_truth: str
    text: str
    extra: dict = field(default_factory=dict)
    verifier: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        self._convert("token_ids", torch.int32)


@dataclass(frozen=True)
class EpisodeResult:
    """What an agent says of a conversation that has ended.

    Args:
        reward: the score; None: the reward function scores the conversation.
        numbers: further numbers by name, which are logged.
        error: why the agent failed; None: it did not.
    """

    reward: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


def inserted_tokens(parts: Sequence[tuple[int, int]]) -> int:
    """Number of tokens that an environment inserted.

    Args:
        parts: (version, number of tokens) of a response's parts.
    """
    return sum(tokens for version, tokens in parts if version == NO_WEIGHTS)


@dataclass(frozen=True, eq=False)
class Trajectory(_ComparedByValue):
    """One sampled response. In a conversation, an environment's tokens are parts of it.

    Args:
        prompt: the prompt.
        response_ids: int32 ``[L]``, generated tokens, the stop token included when one was
            generated, and an environment's tokens between them. This and ``logprobs`` may be any
            sequence, which is converted.
        logprobs: float32 ``[L]``, log-probability of each response token under the distribution it
            was sampled from, before top-p/top-k/min-p truncation: softmax(logits / temperature); 0
            for an environment's tokens.
        finish_reason: "stop" (a stop token was generated), "length", "abort" or ``OPEN``.
        weight_version: version of the weights that generated the response, or its last part.
        routed_experts: int16 ``[tokens, layers, k]``, experts chosen by the engine's routers for
            the first tokens of prompt and response (the last generated token is never routed);
            None if the engine does not report them.
        earlier: (version, number of tokens) of the parts before the last one, in order; the version
            of an environment's part is ``NO_WEIGHTS``.
        episode: what the agent says of the conversation, on the rank that ran the agent.
    """

    prompt: Prompt
    response_ids: Tensor
    logprobs: Tensor
    finish_reason: str
    weight_version: int
    routed_experts: Tensor | None = None
    earlier: tuple[tuple[int, int], ...] = ()
    episode: EpisodeResult | None = None

    def __post_init__(self) -> None:
        self._convert("response_ids", torch.int32)
        self._convert("logprobs", torch.float32)

    @property
    def length(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.response_ids)

    @property
    def inserted(self) -> int:
        """Number of the environment's tokens among them."""
        return inserted_tokens(self.parts)

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


_DEFAULT = torch.empty(0)
"""Default of a tensor field whose true default depends on the number of tokens."""


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Sequences of a batch on one flat token axis, as far as this rank holds them.

    Args:
        tokens_T: int64 ``[T]``.
        cu_seqlens: int64 ``[H + 1]``, of the sequences held.
        response_mask_T: float32 ``[T]``, 1 on response tokens, which are those that the policy
            generated; 0 on an environment's tokens between them.
        end_mask_T: float32 ``[T]``, 1 on an end slot: a position after a response's stop token, for
            the terminal state, which has a value but no action. Zeros (default) without end slots.
        routed_experts_T: uint8 or int16 ``[T, layers, k]``, experts chosen by the engine;
            ``unknown_expert`` of the dtype where unknown. ``[T, 0, 0]`` (default) if the engine
            does not report them.
        expert_layers: decoder layer of each layer of ``routed_experts_T``; None: all, in order.
        held_H: int64 ``[H]``, indices in the batch of the sequences held, ascending; default: all.
        lengths_B: int64 ``[B]``, tokens of each sequence, end slot included.
        response_B: int64 ``[B]``, response tokens of each sequence.
        end_B: int64 ``[B]``, end slots of each sequence, 0 or 1.
        inserted_B: int64 ``[B]``, an environment's tokens between the response tokens of each
            sequence.
        home_B: int32 ``[B]``, the rank that holds each sequence between passes; -1 (default): every
            rank.
        digest_B: int64 ``[B]``, equal for sequences of equal tokens; None: not computed.
    """

    tokens_T: Tensor
    cu_seqlens: Tensor
    response_mask_T: Tensor
    end_mask_T: Tensor = _DEFAULT
    routed_experts_T: Tensor = _DEFAULT
    expert_layers: tuple[int, ...] | None = None
    held_H: Tensor = _DEFAULT
    lengths_B: Tensor = _DEFAULT
    response_B: Tensor = _DEFAULT
    end_B: Tensor = _DEFAULT
    inserted_B: Tensor = _DEFAULT
    home_B: Tensor = _DEFAULT
    digest_B: Tensor | None = None

    def __post_init__(self) -> None:
        def fill(name: str, make: Callable[[], Tensor]) -> None:
            if getattr(self, name) is _DEFAULT:
                object.__setattr__(self, name, make())

        def count(mask_T: Tensor) -> Tensor:
            sums_H = torch.segment_reduce(mask_T.double(), "sum", offsets=self.cu_seqlens)
            return sums_H.long()

        tokens, held = len(self.tokens_T), len(self.cu_seqlens) - 1
        fill("routed_experts_T", lambda: torch.empty(tokens, 0, 0, dtype=torch.int16))
        fill("end_mask_T", lambda: torch.zeros_like(self.response_mask_T))
        fill("held_H", lambda: torch.arange(held))
        fill("lengths_B", self.cu_seqlens.diff)
        fill("response_B", lambda: count(self.response_mask_T))
        fill("end_B", lambda: count(self.end_mask_T))
        fill("inserted_B", lambda: torch.zeros_like(self.lengths_B))
        fill("home_B", lambda: torch.full((held,), -1, dtype=torch.int32))

    @property
    def num_sequences(self) -> int:
        """Number of sequences of the batch, on all ranks."""
        return len(self.lengths_B)

    @property
    def value_mask_T(self) -> Tensor:
        """1 on response tokens and end slots, where states have values: float32 ``[T]``."""
        return self.response_mask_T + self.end_mask_T

    @property
    def prompt_B(self) -> Tensor:
        """Number of prompt tokens of each sequence: int64 ``[B]``."""
        return self.lengths_B - self.answer_B - self.end_B

    @property
    def answer_B(self) -> Tensor:
        """Tokens between prompt and end slot, an environment's included: int64 ``[B]``."""
        return self.response_B + self.inserted_B

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds every sequence."""
        return bool((self.home_B < 0).all())

    def at_home(self, rank: int) -> Tensor:
        """Indices of the sequences whose home is a rank, ascending: int64."""
        return ((self.home_B == rank) | (self.home_B < 0)).nonzero()[:, 0]

    def places(self, indices: Sequence[int] | Tensor) -> Tensor:
        """Position of sequences of the batch among those held; -1: not held. int64."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        if len(self.held_H) == self.num_sequences:
            return chosen
        place_B = torch.full((self.num_sequences,), -1)
        place_B[self.held_H] = torch.arange(len(self.held_H))
        return place_B[chosen]

    def here(self, x_B: Tensor) -> Tensor:
        """The held sequences' part of a tensor of all sequences: ``[B, ...]`` to ``[H, ...]``."""
        return x_B if len(self.held_H) == self.num_sequences else x_B[self.held_H]


def unknown_expert(dtype: torch.dtype) -> int:
    """The number that marks an unknown choice in ``Sequences.routed_experts_T``."""
    return 255 if dtype == torch.uint8 else -1


@dataclass(frozen=True, kw_only=True)
class Batch(Sequences):
    """Scored trajectories.

    Args:
        rollout_logprobs_T: float32 ``[T]``, the engine's log-probabilities.
        group_B: int64 ``[B]``, uid of the prompt.
        scores_B: float32 ``[B]``, the reward of each trajectory: the outcome reward, and the sum
            of its ``token_rewards_T``.
        truncated_B: bool ``[B]``, not ended by a stop token.
        weight_version_T: int64 ``[T]``, of the weights that generated each token; -1 elsewhere.
        token_rewards_T: float32 ``[T]``, the part of the reward that belongs to single tokens
            (process rewards); default: zeros.
    """

    rollout_logprobs_T: Tensor
    group_B: Tensor
    scores_B: Tensor
    truncated_B: Tensor
    weight_version_T: Tensor
    token_rewards_T: Tensor = _DEFAULT

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token_rewards_T is _DEFAULT:
            object.__setattr__(self, "token_rewards_T", no_token_rewards(self.response_mask_T))


def no_token_rewards(mask_T: Tensor) -> Tensor:
    """``Batch.token_rewards_T`` where no token has a reward: zeros that take no memory per token.

    Args:
        mask_T: float32 ``[T]``, for the size.
    """
    return mask_T.new_zeros(()).expand_as(mask_T)


@dataclass(frozen=True)
class ModelOutputs:
    """A batch with the models' outputs before any update, on the tokens that this rank holds.

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
        entropy_T: entropy of the actor's distribution of token t, float32 ``[T]`` (nats); zeros
            (None) if the actor did not compute.
    """

    batch: Batch
    logprobs_T: Tensor
    ref_logprobs_T: Tensor
    values_T: Tensor
    has_actor_logprobs: bool = True
    full_kl_T: Tensor | None = None
    ref_hidden_T: Tensor | None = None
    entropy_T: Tensor | None = None

    def __post_init__(self) -> None:
        if self.full_kl_T is None:
            object.__setattr__(self, "full_kl_T", torch.zeros_like(self.logprobs_T))
        if self.ref_hidden_T is None:
            object.__setattr__(self, "ref_hidden_T", torch.empty(len(self.logprobs_T), 0))
        if self.entropy_T is None:
            object.__setattr__(self, "entropy_T", torch.zeros_like(self.logprobs_T))


@dataclass(frozen=True)
class Experience:
    """The training data of the update stage, on the tokens that this rank holds.

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

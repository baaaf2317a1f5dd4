"""The sequences of a batch on one token axis, shared out over the ranks.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_DEFAULT = torch.empty(0)
"""Default of a tensor field whose true default depends on the number of tokens."""


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Sequences of a batch on one flat token axis, as far as this rank holds them.

    Args:
        cu_seqlens: int64 ``[H + 1]``, of the sequences held.
        response_mask_T: float32, 1 on response tokens, which are those that the policy
            generated; 0 on an environment's tokens between them.
        end_mask_T: float32, 1 on an end slot: a position after a response's last token, for
            the state after it, which has a value but no action. Zeros (default) without end slots.
        routed_experts_T: uint8 or int16 ``[T, layers, k]``, experts chosen by the engine;
            ``unknown_expert`` of the dtype where unknown. ``[T, 0, 0]`` (default) if the engine
            does not report them.
        expert_layers: decoder layer of each layer of ``routed_experts_T``; None: all, in order.
        held_H: int64, indices in the batch of the sequences held, ascending; default: all.
        lengths_B: int64, tokens of each sequence, end slot included.
        response_B, end_B, inserted_B: int64, of these the response tokens, the end slots (0 or 1)
            and an environment's tokens between the response tokens.
        home_B: int32, the rank that holds each sequence between passes; -1 (default): every rank.
        digest_B: int64, equal for sequences of equal tokens; None: not computed.
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
        def count(mask_T: Tensor) -> Tensor:
            sums_H = torch.segment_reduce(mask_T.double(), "sum", offsets=self.cu_seqlens)
            return sums_H.long()

        tokens, held = len(self.tokens_T), len(self.cu_seqlens) - 1
        self._fill("routed_experts_T", lambda: torch.empty(tokens, 0, 0, dtype=torch.int16))
        self._fill("end_mask_T", lambda: torch.zeros_like(self.response_mask_T))
        self._fill("held_H", lambda: torch.arange(held))
        self._fill("lengths_B", self.cu_seqlens.diff)
        self._fill("response_B", lambda: count(self.response_mask_T))
        self._fill("end_B", lambda: count(self.end_mask_T))
        self._fill("inserted_B", lambda: torch.zeros_like(self.lengths_B))
        self._fill("home_B", lambda: torch.full((held,), -1, dtype=torch.int32))

    def _fill(self, name: str, make: Callable[[], Tensor]) -> None:
        if getattr(self, name) is _DEFAULT:
            object.__setattr__(self, name, make())

    @property
    def num_sequences(self) -> int:
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


@dataclass(frozen=True)
class EpisodeIndex:
    """The episodes of a batch's sequences. Shapes: ``E`` episodes of ``B`` sequences.

    Args:
        of_B: int64 ``[B]``, place of each sequence's episode among the episodes.
        last_E: int64 ``[E]``, the last sequence of each episode, which is its answer.
    """

    of_B: Tensor
    last_E: Tensor

    @property
    def has_branches(self) -> bool:
        return len(self.last_E) < len(self.of_B)

    def sum(self, x_B: Tensor) -> Tensor:
        """Sum over the sequences of each episode: ``[B]`` to ``[E]``."""
        return x_B.new_zeros(len(self.last_E)).index_add_(0, self.of_B, x_B)

    def sequences(self, episodes: Sequence[int]) -> list[int]:
        found: list[list[int]] = [[] for _ in self.last_E]
        for number, episode in enumerate(self.of_B.tolist()):
            found[episode].append(number)
        return [number for episode in episodes for number in found[episode]]


@dataclass(frozen=True, kw_only=True)
class Batch(Sequences):
    """The sequences of scored episodes.

    An episode's last sequence is its answer. The ones before it are what the policy generated in
    histories that the episode left. They have its score.

    Args:
        rollout_logprobs_T: float32 ``[T]``, the engine's log-probabilities.
        group_B: int64 ``[B]``, uid of the prompt.
        episode_B: int64 ``[B]``, equal for the sequences of one episode; default: each sequence
            is an episode.
        scores_B: float32 ``[B]``, the reward of each sequence's episode: the outcome reward, and
            the sum of the ``token_rewards_T`` of its sequences.
        truncated_B: bool ``[B]``, not ended by a stop token.
        weight_version_T: int64 ``[T]``, of the weights that generated each token; -1 elsewhere.
        token_rewards_T: float32 ``[T]``, the part of the reward that belongs to single tokens
            (process rewards); default: zeros.
        parts_B: float32 ``[B, K]``, the parts of each sequence's reward that ``gdpo`` normalises;
            default: none.
    """

    rollout_logprobs_T: Tensor
    group_B: Tensor
    scores_B: Tensor
    truncated_B: Tensor
    weight_version_T: Tensor
    token_rewards_T: Tensor = _DEFAULT
    episode_B: Tensor = _DEFAULT
    parts_B: Tensor = _DEFAULT

    def __post_init__(self) -> None:
        super().__post_init__()
        self._fill("episode_B", lambda: torch.arange(self.num_sequences))
        self._fill("parts_B", lambda: torch.empty(self.num_sequences, 0))
        self._fill("token_rewards_T", lambda: no_token_rewards(self.response_mask_T))

    @property
    def episodes(self) -> EpisodeIndex:
        _, of_B = torch.unique(self.episode_B, return_inverse=True)
        last_E = torch.zeros(int(of_B.max()) + 1 if len(of_B) else 0, dtype=torch.int64)
        last_E.scatter_reduce_(0, of_B, torch.arange(len(of_B)), "amax")
        return EpisodeIndex(of_B, last_E)


def no_token_rewards(mask_T: Tensor) -> Tensor:
    """``Batch.token_rewards_T`` where no token has a reward: zeros without memory per token."""
    return mask_T.new_zeros(()).expand_as(mask_T)

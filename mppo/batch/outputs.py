"""What the models say of a batch before any update, and the training data made of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mppo.batch.batch import Batch, no_token_rewards


@dataclass(frozen=True)
class Outputs:
    """A batch with the models' outputs before any update, on the tokens that this rank holds.
    Tensors are float32 ``[T]`` unless stated otherwise.

    Args:
        logprobs_T: the policy's log-probabilities: the actor's, or in bypass mode the engine's.
        ref_logprobs_T: the reference's; equal to ``logprobs_T`` without a reference model.
        values_T: the critic's value of the state before token t; zeros without a critic.
        has_actor_logprobs: whether ``logprobs_T`` are the actor's.
        full_kl_T: KL of actor against reference over the vocabulary (nats); zeros (None) if the
            recipe does not use it.
        ref_hidden_T: the reference's hidden states that predict token t, ``[T, hidden]`` in the
            model's dtype; ``[T, 0]`` (None) if the actor's loss does not use them.
        entropy_T: entropy of the actor's distribution of token t (nats); zeros (None) if the actor
            did not compute.
        squares_T: sum of the actor's squared probabilities of the vocabulary at token t; zeros
            (None) if the recipe does not use it.
    """

    batch: Batch
    logprobs_T: Tensor
    ref_logprobs_T: Tensor
    values_T: Tensor
    has_actor_logprobs: bool = True
    full_kl_T: Tensor | None = None
    ref_hidden_T: Tensor | None = None
    entropy_T: Tensor | None = None
    squares_T: Tensor | None = None

    def __post_init__(self) -> None:
        if self.full_kl_T is None:
            object.__setattr__(self, "full_kl_T", torch.zeros_like(self.logprobs_T))
        if self.ref_hidden_T is None:
            object.__setattr__(self, "ref_hidden_T", torch.empty(len(self.logprobs_T), 0))
        if self.entropy_T is None:
            object.__setattr__(self, "entropy_T", torch.zeros_like(self.logprobs_T))
        if self.squares_T is None:
            object.__setattr__(self, "squares_T", no_token_rewards(self.logprobs_T))


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

    old: Outputs
    rewards_T: Tensor
    advantages_T: Tensor
    returns_T: Tensor
    loss_weight_T: Tensor

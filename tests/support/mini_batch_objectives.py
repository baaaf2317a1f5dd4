"""The objectives of a mini-batch, evaluated on all of its sequences in one micro-batch."""

from __future__ import annotations

from torch import Tensor

from mppo.batch.head_outputs import PolicyOutputs, ValueOutputs
from mppo.recipe.sections.algorithm import RolloutCorrectionConfig
from mppo.recipe.sections.roles import ActorConfig, CriticConfig
from mppo.trainer.targets import PolicyTargets, ValueTargets
from mppo.trainer.update.objectives import PolicyObjective, ValueObjective


def policy_objective(
    logprobs_T: Tensor,
    entropy_T: Tensor,
    targets: PolicyTargets,
    actor: ActorConfig,
    full_kl_T: Tensor | None = None,
    correction: RolloutCorrectionConfig | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The actor's loss and statistics."""
    sequences = tuple(range(len(targets.cu_seqlens) - 1))
    outputs = PolicyOutputs(logprobs_T, entropy_T, full_kl_T)
    correction = correction or RolloutCorrectionConfig()
    return PolicyObjective(targets, sequences, actor, correction)(outputs, sequences)


def value_objective(
    values_T: Tensor, targets: ValueTargets, critic: CriticConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's loss and statistics."""
    sequences = tuple(range(len(targets.cu_seqlens) - 1))
    return ValueObjective(targets, sequences, critic)(ValueOutputs(values_T), sequences)

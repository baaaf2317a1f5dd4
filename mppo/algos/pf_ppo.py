"""PF-PPO: resample the batch by its scores before the update.

Source: Policy Filtration for RLHF, https://arxiv.org/abs/2409.06957; verl
``compute_pf_ppo_reweight_data``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mppo.safety.input_error import InputError

WEIGHT_FLOOR = 1e-8


def resampling_weights(scores_B: Tensor, method: str, power: float = 2.0) -> Tensor:
    """Unnormalised probability of each sequence.

    - ``pow``: ``|score| ** power``
    - ``max_min``: 1 for the batch's largest and smallest score, else 0
    - ``max_random``: 0.4 for the largest score, else 0.1

    each plus 1e-8, so that the weights are never all 0.

    Scores are those before any KL penalty.
    """
    if method == "pow":
        weight_B = scores_B.abs().pow(power)
    elif method == "max_min":
        weight_B = ((scores_B == scores_B.max()) | (scores_B == scores_B.min())).to(scores_B.dtype)
    elif method == "max_random":
        weight_B = torch.where(scores_B == scores_B.max(), 0.4, 0.1).to(scores_B.dtype)
    else:
        raise InputError(
            f"pf_ppo.reweight_method: unknown method {method!r}; use pow, max_min or max_random"
        )
    return weight_B + WEIGHT_FLOOR


def resample(weight_B: Tensor, seed: int) -> Tensor:
    """Draw B sequence indices with replacement, by positive weights that need no norm. Equal seeds
    and weights give equal draws, on every rank and after a resume."""
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(
        weight_B.double(), len(weight_B), replacement=True, generator=generator
    )

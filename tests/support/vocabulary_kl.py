"""The KL over the vocabulary from complete logits, with which that of shards is compared."""

from __future__ import annotations

import torch
from torch import Tensor

from mppo.algos.kl import full_kl_shard


def full_kl(logits_TV: Tensor, ref_logits_TV: Tensor) -> Tensor:
    """KL(policy || reference), float ``[T]`` (nats), not negative."""
    log_z_T = torch.logsumexp(logits_TV, dim=-1)
    ref_log_z_T = torch.logsumexp(ref_logits_TV, dim=-1)
    return full_kl_shard(logits_TV, ref_logits_TV, log_z_T, ref_log_z_T).clamp(min=0.0)

"""The routing of one micro-batch: what its routers replay, record and divide their losses by."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class MicroRouting:
    """Routing of one micro-batch, carried by its packing.

    Shapes: ``L`` MoE layers of this rank, ``t`` local tokens, ``E`` experts, ``k`` per token.

    Args:
        training: whether the pass belongs to forward_backward.
        chosen: int64 ``[L, t, k]``, experts to replay; -1 leaves the choice to the router.
        record: ``[L, t, k]``, filled with the experts taken.
        mini_batch_tokens, mini_batch_sequences: of the mini-batch, over all ranks.
        load: float32 ``[L, E]``, each expert's share of the mini-batch's choices; None where no
            loss needs it.
        sequence_t: int64 ``[t]``, index of each token's sequence; None where no loss needs it.
        num_sequences: sequences of this micro-batch.
    """

    training: bool
    chosen: Tensor | None = None
    record: Tensor | None = None
    mini_batch_tokens: int = 1
    mini_batch_sequences: int = 1
    load: Tensor | None = None
    sequence_t: Tensor | None = None
    num_sequences: int = 0

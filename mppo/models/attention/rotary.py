"""Rotary angles per token, for packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from mppo.models.attention.packed_sequences import Packing


class PackedRotary(torch.nn.Module):
    """One of Megatron's rotary embeddings, called with a ``Packing`` instead of a length. Megatron
    passes the result of ``get_rotary_seq_len`` to ``forward``. Here that result is the packing
    itself, so the angles are gathered by position and RoPE is one operation over all sequences.
    ``per_token_dims`` is 2 for ``[T, 1, heads, d]`` and 1 for MLA's ``[T, heads, d]``."""

    def __init__(self, inner: torch.nn.Module, per_token_dims: int) -> None:
        super().__init__()
        self.inner = inner
        self.per_token_dims = per_token_dims

    def get_rotary_seq_len(
        self, inference_context, transformer, transformer_input, config, packed_seq_params=None
    ) -> Packing:
        assert isinstance(packed_seq_params, Packing), "PackedRotary needs a Packing"
        return packed_seq_params

    def forward(self, packing: Packing, offset: int = 0, packed_seq: bool = False, cp_group=None):
        """Angles ``[T, 1, 1, d]`` (``[T, 1, d]`` for MLA), with yarn's scale where it has one."""
        length = int(packing.max_seqlen_q)
        out = self.inner(length, packed_seq=True)
        angles, *scale = out if isinstance(out, tuple) else (out,)
        gathered: Tensor = angles.flatten(1, -2)[:, 0].index_select(0, packing.positions)
        gathered = gathered.view(len(gathered), *(1,) * self.per_token_dims, gathered.shape[-1])
        return (gathered, *scale) if scale else gathered

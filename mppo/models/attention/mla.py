"""MLA: epsilon of inner norms, angles per token, tensor parallelism without Transformer Engine."""

from __future__ import annotations

import copy

from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig

from mppo.models.attention.rotary import PackedRotary


class PublishedMLA(MLASelfAttention):
    """Megatron's MLA with ``config.mla_norm_epsilon`` in its inner norms, and angles per token.

    Megatron builds the norms of the down-projected queries and of the down-projected keys and
    values with ``config.layernorm_epsilon``; the published models use another epsilon (see
    ``mppo.models.families.architectures.MLA_NORM_EPSILON``). No other module inside MLA reads that
    field, so all of them, also Transformer Engine's, get a changed copy of the configuration.

    For sequences in Transformer Engine's format, Megatron reads their lengths from the GPU four
    times in every layer, to select the rotary angles. Here the projections receive the original
    packing, and ``PackedRotary`` selects the angles by position on the GPU.
    """

    def __init__(self, config: MLATransformerConfig, *args, **kwargs) -> None:
        inner = copy.copy(config)
        # not a field of Megatron's: set from FamilyConfig.mla_norm_epsilon
        inner.layernorm_epsilon = vars(config)["mla_norm_epsilon"]
        super().__init__(inner, *args, **kwargs)
        self.config = config
        if not config.apply_rope_fusion:
            self.rotary_pos_emb = PackedRotary(self.rotary_pos_emb, per_token_dims=1)

    def get_query_key_value_tensors(
        self, hidden_states, key_value_states=None, position_ids=None, packed_seq_params=None, **kw
    ):
        packing = packed_seq_params
        if isinstance(self.rotary_pos_emb, PackedRotary):
            packing = getattr(packing, "packing", packing)
        return super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packing, **kw
        )


class LocalMLA(PublishedMLA):
    """MLA without Transformer Engine, correct under tensor parallelism.

    The output of Megatron's local column-parallel key-value down projection is split over its
    width. Megatron then gathers the rotary part of the keys with a backward pass that keeps only
    the gradient from this rank's heads. If the output is split over the tokens instead, Megatron
    takes the path that sums the gradient over the ranks; a hook therefore exchanges the two splits.
    Without sequence parallelism there is no such path (and the query norm's gradient would count
    twice), hence the rule that MLA under TP needs sequence parallelism.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.config.sequence_parallel:
            self.linear_kv_down_proj.register_forward_hook(_split_tokens)


def _split_tokens(module, args, outputs):
    """``[T, 1, width / tp]`` on every rank to ``[T / tp, 1, width]``."""
    output, bias = outputs
    return all_to_all_hp2sp(output).unsqueeze(1), bias

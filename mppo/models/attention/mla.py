"""Latent attention (MLA): its inner norms' epsilon, and tensor parallelism without Transformer
Engine."""

from __future__ import annotations

import copy

from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig


class LatentAttention(MLASelfAttention):
    """Megatron's, whose inner norms have the epsilon ``config.mla_norm_epsilon``.

    Megatron builds the norms of the down-projected queries and of the down-projected keys and
    values with ``config.layernorm_epsilon``, the models are published with another (see
    ``mppo.models.families.architectures.MLA_NORM_EPSILON``). No other module inside reads that
    field, so all of them are built with a copy of the configuration. That holds with Transformer
    Engine, too, which merges each of the two norms with the projection that follows.
    """

    def __init__(self, config: MLATransformerConfig, *args, **kwargs) -> None:
        inner = copy.copy(config)
        inner.layernorm_epsilon = config.mla_norm_epsilon
        super().__init__(inner, *args, **kwargs)
        self.config = config


class LocalLatentAttention(LatentAttention):
    """For the layers without Transformer Engine, with the key-value down projection's output whole
    for a share of the tokens.

    Megatron hands its local column-parallel projection on sharded, and then gathers the rotary part
    of the keys with a backward pass that keeps only this rank's heads' share of the gradient. Given
    whole rows of its share of the tokens it takes the path that sums the shares. Without sequence
    parallelism there is no such path (and the query norm's gradient would count twice), hence the
    rule that MLA under TP needs it.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.config.sequence_parallel:
            self.linear_kv_down_proj.register_forward_hook(_whole_rows)


def _whole_rows(module, args, outputs):
    """``[T, 1, width / tp]`` on every rank to ``[T / tp, 1, width]``."""
    output, bias = outputs
    return all_to_all_hp2sp(output).unsqueeze(1), bias

"""GPT-NeoX and Pythia in SGLang, which has no class for this family."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from mppo.models.families.family import ACTIVATIONS, activation_name


class _Attention(nn.Module):
    """Attention whose projection keeps the checkpoint's order: by head, then q, k and v."""

    def __init__(self, config: Any, layer: int, quantisation: Any) -> None:
        super().__init__()
        hidden, heads, rope = config.hidden_size, config.num_attention_heads, config.rope_parameters
        self.heads = heads // get_parallel().tp_size
        width = hidden // heads
        self.query_key_value = ColumnParallelLinear(hidden, 3 * hidden, quant_config=quantisation)
        self.dense = RowParallelLinear(hidden, hidden, quant_config=quantisation)
        self.rotary_emb = get_rope(
            width,
            rotary_dim=int(width * rope.get("partial_rotary_factor", 1.0)),
            max_position=config.max_position_embeddings,
            base=rope["rope_theta"],
            rope_scaling=rope if rope.get("rope_type", "default") != "default" else None,
        )
        self.attn = RadixAttention(
            self.heads, width, scaling=width**-0.5, num_kv_heads=self.heads, layer_id=layer
        )

    def forward(self, positions: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        mixed, _ = self.query_key_value(hidden)
        parts = mixed.view(len(mixed), self.heads, 3, -1).unbind(2)
        q, k, v = (part.flatten(1) for part in parts)
        q, k = self.rotary_emb(positions, q, k)
        return self.dense(self.attn(q, k, v, batch))[0]


class _FeedForward(nn.Module):
    def __init__(self, config: Any, quantisation: Any) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        self.dense_h_to_4h = ColumnParallelLinear(hidden, width, quant_config=quantisation)
        self.dense_4h_to_h = RowParallelLinear(width, hidden, quant_config=quantisation)
        self.activation = ACTIVATIONS[activation_name(config)]

    def forward(self, hidden: Tensor) -> Tensor:
        wide, _ = self.dense_h_to_4h(hidden)
        return self.dense_4h_to_h(self.activation(wide))[0]


class _Layer(nn.Module):
    def __init__(self, config: Any, layer: int, quantisation: Any) -> None:
        super().__init__()
        self.parallel = config.use_parallel_residual
        self.input_layernorm = _norm(config)
        self.post_attention_layernorm = _norm(config)
        self.attention = _Attention(config, layer, quantisation)
        self.mlp = _FeedForward(config, quantisation)

    def forward(self, positions: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        attended = hidden + self.attention(positions, self.input_layernorm(hidden), batch)
        read = hidden if self.parallel else attended
        return attended + self.mlp(self.post_attention_layernorm(read))


class _Decoder(nn.Module):
    def __init__(self, config: Any, quantisation: Any) -> None:
        super().__init__()
        self.embed_in = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(_Layer(config, layer, quantisation) for layer in layers)
        self.final_layer_norm = _norm(config)


def _norm(config: Any) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


class GPTNeoXForCausalLM(nn.Module):
    """The actor's model in SGLang's layers; parameters have the checkpoint's names."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.gpt_neox = _Decoder(config, quant_config)
        self.embed_out = (
            self.gpt_neox.embed_in
            if config.tie_word_embeddings
            else ParallelLMHead(config.vocab_size, config.hidden_size)
        )
        self.logits_processor = LogitsProcessor(config)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None = None,
    ) -> LogitsProcessorOutput:
        """Logits of a batch: tokens and positions ``[T]``."""
        hidden = self.gpt_neox.embed_in(input_ids) if input_embeds is None else input_embeds
        for layer in self.gpt_neox.layers:
            hidden = layer(positions, hidden, forward_batch)
        hidden = self.gpt_neox.final_layer_norm(hidden)
        return self.logits_processor(input_ids, hidden, self.embed_out, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy checkpoint tensors; masks and rotary buffers of old checkpoints are skipped."""
        held = dict(self.named_parameters())
        for name, tensor in weights:
            if name in held:
                load = getattr(held[name], "weight_loader", default_weight_loader)
                load(held[name], tensor)


EntryClass = GPTNeoXForCausalLM

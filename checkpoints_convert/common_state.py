"""The values that Megatron-LM reads from ``common.pt`` beside the tensors."""

from __future__ import annotations

from argparse import Namespace

from mppo.weights.shape import ModelShape


def common_state(shape: ModelShape) -> dict[str, object]:
    """Version, iteration, and the arguments that Megatron-LM stores when it saves.

    Without ``--finetune`` Megatron-LM's loader compares layers, width and heads with those of the
    run. If ``args`` is missing, its ``checkpointing.py`` of commit 699abf15 fails, and that
    of commit 0032978f does not. Megatron-LM looks for no optimizer or random state if
    ``latest_checkpointed_iteration.txt`` contains ``release``.

    Args:
        shape: the model's sizes.

    Returns:
        Plain values, and a Namespace of plain values under Megatron-LM's argument names.
    """
    args = Namespace(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        group_query_attention=shape.kv_heads != shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        num_experts=shape.num_experts or None,
        moe_ffn_hidden_size=shape.expert_ffn or None,
        padded_vocab_size=shape.vocab,
        untie_embeddings_and_output_weights=not shape.tied,
        add_bias_linear=shape.biases,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        multi_latent_attention=shape.mla is not None,
        normalization="LayerNorm" if shape.biases else "RMSNorm",
        position_embedding_type="learned_absolute" if shape.positions else "rope",
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        no_save_optim=True,
        no_save_rng=True,
    )
    return {"checkpoint_version": 3.0, "iteration": 0, "args": args}

"""Tensors that Transformer Engine keeps on a GPU: workspaces, and gradients that nothing reads."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from mppo.parallel.layout import Layout
from mppo.recipe.model_shape import ModelShape

_WORKSPACE = 32 * 1024**2 + 1024
"""Bytes of a workspace of cuBLAS on Hopper and newer GPUs (``get_cublas_workspace_size_bytes``)."""
_GROUPED_WORKSPACES = 4
"""Workspaces of a grouped product, one for each stream (``get_num_cublas_streams``)."""

Matrix = tuple[int, int]


def kept_tensors(
    shape: ModelShape, layout: Layout, sparse: Sequence[bool], trained: bool, itemsize: int
) -> dict[Hashable, int]:
    """Bytes that Transformer Engine keeps for a role's layers on one rank, by tensor; roles share a
    tensor that they have in common.

    A layer adds its weights' gradient to Megatron's buffer itself. Autograd gets a tensor that
    nothing reads, which all layers with weights of the same shape share (``get_dummy_wgrad``).

    Args:
        sparse: for each layer of the rank, whether its feed-forward is a mixture of experts.
    """
    workspaces = 1 + (_GROUPED_WORKSPACES if any(sparse) else 0)
    matrices: set[Matrix] = set()
    if trained:
        matrices.update(_attention(shape, layout.tp))
    if trained and not all(sparse):
        matrices.update(_feed_forward(shape, shape.ffn, layout.tp))
    if trained and any(sparse):
        matrices.update(_feed_forward(shape, shape.expert_ffn, layout.etp))
        matrices.update(_feed_forward(shape, shape.shared_ffn, layout.tp))
    gradients: dict[Hashable, int] = {
        ("gradient", rows, columns, itemsize): itemsize * rows * columns
        for rows, columns in matrices
    }
    return {**{("workspace", n): _WORKSPACE for n in range(workspaces)}, **gradients}


def _attention(shape: ModelShape, tp: int) -> Iterator[Matrix]:
    """Output and input width of the attention's linear layers on one rank."""
    mla, hidden, heads = shape.mla, shape.hidden, shape.heads // tp
    if mla is None:
        key_values = 2 * max(1, shape.kv_heads // tp)
        yield (heads + key_values) * shape.head_dim, hidden
        yield hidden, heads * shape.head_dim
        return
    queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is not None:
        yield mla.q_lora_rank, hidden
    yield queries, mla.q_lora_rank or hidden
    yield mla.kv_lora_rank + mla.qk_rope_head_dim, hidden
    yield heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank
    yield hidden, heads * mla.v_head_dim


def _feed_forward(shape: ModelShape, width: int, split: int) -> Iterator[Matrix]:
    """The same of a feed-forward; without width, there is none."""
    if width:
        yield (1 + shape.gated) * width // split, shape.hidden
        yield shape.hidden, width // split

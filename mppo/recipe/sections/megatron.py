"""The recipe's ``megatron`` sections: a role's parallel layout and its Megatron-Core options."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt

from mppo.parallel.layout import Layout
from mppo.recipe.sections.section import Section


class Offload(Section):
    """Parts of a role that move to host memory in the phases that do not use them."""

    parameters: bool = False
    """The weights, also those of the reference."""
    gradients: bool = False
    """The gradient buffers. Their memory is freed and nothing is copied: an update starts from
    zeros."""
    optimizer: bool = False
    """Adam's moments and the float32 main weights."""


class MegatronConfig(Section):
    """A role's layout over the ranks, memory options, and mixture-of-experts router.

    Data parallelism is what the other sizes leave: world size / (TP x PP x CP).
    """

    tensor_model_parallel_size: int = Field(default=1, gt=0)
    """TP: ranks that share each matrix of a layer."""
    pipeline_model_parallel_size: int = Field(default=1, gt=0)
    """PP: pipeline stages."""
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, gt=1)
    """VPP: chunks of layers per pipeline stage (interleaved schedule). null: one."""
    context_parallel_size: int = Field(default=1, gt=0)
    """CP: ranks that share each sequence."""
    cp_comm_type: Literal["all_gather", "p2p"] | None = None
    """Exchange of keys and values over the context-parallel ranks: ``all_gather`` collects all of
    them; ``p2p`` passes them around a ring while attention is computed, with less memory. null:
    Transformer Engine's default where it is installed, else p2p for MLA and all_gather for other
    attention."""
    expert_model_parallel_size: int = Field(default=1, gt=0)
    """EP: ranks over which a layer's experts are divided."""
    expert_tensor_parallel_size: int | None = Field(default=1, gt=0)
    """ETP: ranks that share each matrix of an expert. null: TP, as in Megatron and verl."""
    sequence_parallel: bool = True
    """Divide the activations between tensor-parallel matrices over the TP ranks. No effect with
    TP = 1."""
    num_layers_in_first_pipeline_stage: int | None = Field(default=None, gt=0)
    """Decoder layers of the first stage. null: an even share."""
    num_layers_in_last_pipeline_stage: int | None = Field(default=None, gt=0)
    """Decoder layers of the last stage. null: an even share."""
    pipeline_layers: tuple[PositiveInt, ...] | None = None
    """Decoder layers of every pipeline chunk (PP x VPP numbers), in model order. null: even
    shares."""
    use_distributed_optimizer: bool = True
    """Divide optimizer states over the data-parallel ranks (ZeRO stage 1)."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes again: none, those of the modules that
    Megatron-Core selects (``recompute_modules``), or every decoder layer from its input."""
    offload_activations: bool = False
    """Keep activations in host memory between forward and backward pass."""
    offload: Literal["auto", "none"] | Offload = "auto"
    """Parts that leave the device in the phases that do not use them: ``none``, some of
    ``parameters``, ``gradients``, ``optimizer``, or ``auto``: the fewest with which every phase
    fits the device, and none on the CPU. In ``ref.megatron``, where it is the only key, the
    others are the actor's."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients over the data-parallel ranks in the background: during the backward pass,
    or, in a schedule shared with the other role, while that role computes. null: on CUDA with the
    distributed optimizer."""
    overlap_param_gather: bool | None = None
    """Gather the updated weights from the data-parallel ranks in the background, until the role's
    next pass. Needs ``use_distributed_optimizer``. null: on CUDA with the distributed optimizer."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss"] = "none"
    """Load-balancing loss of the router: over the mini-batch (aux_loss) or within each sequence
    (seq_aux_loss)."""
    moe_aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss."""
    moe_z_loss_coeff: float | None = Field(default=None, ge=0)
    """Coefficient of the mean squared log-sum-exp of the router's logits. null: no z-loss."""
    moe_router_bias_update_rate: float = Field(default=0.0, ge=0)
    """Step of the router's expert bias after each mini-batch (auxiliary-loss-free balancing); 0
    keeps the loaded bias."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach the ranks of their experts. ``allgather`` needs PP = 1."""
    moe_router_dtype: Literal["fp32", "fp64"] = "fp32"
    """Type of the router's logits and of the weights that sum the experts' outputs."""
    moe_expert_capacity_factor: float | None = Field(default=None, gt=0)
    """An expert's capacity, as a multiple of its even share of a rank's tokens in a micro-batch;
    choices above it are dropped. null: nothing is dropped."""
    freeze_moe_router: bool = False
    """Do not train the routers and the gates of shared experts."""
    override_transformer_config: dict[str, Any] = Field(default_factory=dict)
    """Further fields of Megatron-Core's TransformerConfig, such as ``recompute_modules``."""

    @property
    def expert_tensor_size(self) -> int:
        """ETP as a number."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    def key_exchange(self, has_mla: bool) -> Literal["all_gather", "p2p"]:
        """``cp_comm_type``, or without one the choice for a model with or without MLA."""
        return self.cp_comm_type or ("p2p" if has_mla else "all_gather")

    def layout(self, world: int) -> Layout:
        """This section's layout over ``world`` ranks.

        Raises:
            ValueError: the sizes do not divide ``world``.
        """
        return Layout(
            world=world,
            tp=self.tensor_model_parallel_size,
            pp=self.pipeline_model_parallel_size,
            vpp=self.virtual_pipeline_model_parallel_size or 1,
            cp=self.context_parallel_size,
            ep=self.expert_model_parallel_size,
            etp=self.expert_tensor_size,
        )

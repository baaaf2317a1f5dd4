"""Keys of verl and OpenRLHF that mppo has under another name.

``role_rows``, ``run_rows`` and ``engine_rows`` have all other keys of verl.
"""

from __future__ import annotations

ROLES = ("actor", "critic", "ref", "reward_model")

RENAMED: dict[str, str] = {
    "actor_rollout_ref.actor": "actor",
    "actor_rollout_ref.rollout": "rollout",
    "actor_rollout_ref.ref": "ref",
    "actor_rollout_ref.model": "model",
    "actor_rollout_ref.critic": "critic",
    "actor_rollout.ref.rollout": "rollout",
    "critic.model.path": "critic.path",
    "critic.model.tokenizer_path": "model.tokenizer_path",
    "critic.model.trust_remote_code": "model.trust_remote_code",
    "data.trust_remote_code": "model.trust_remote_code",
    "data.tokenizer": "model.tokenizer_path",
    "data.input_key": "data.prompt_key",
    "data.label_key": "data.answer_key",
    "model.enable_activation_offload": "actor.megatron.offload_activations",
    "critic.model.enable_activation_offload": "critic.megatron.offload_activations",
    "model.override_config.moe_config.freeze_moe_router": "actor.megatron.freeze_moe_router",
    "critic.model.override_config.moe_config": "critic.megatron",
    "critic.forward_micro_batch_size_per_gpu": "critic.log_prob_micro_batch_size_per_gpu",
    "critic.forward_max_token_len_per_gpu": "critic.log_prob_max_token_len_per_gpu",
    "rollout.log_prob_micro_batch_size_per_gpu": "actor.log_prob_micro_batch_size_per_gpu",
    "rollout.log_prob_max_token_len_per_gpu": "actor.log_prob_max_token_len_per_gpu",
    "rollout.log_prob_use_dynamic_bsz": "actor.use_dynamic_bsz",
    "ref.log_prob_use_dynamic_bsz": "ref.use_dynamic_bsz",
    "rollout.prompt_length": "data.max_prompt_length",
    "rollout.response_length": "data.max_response_length",
    "rollout.gpu_memory_utilization": "rollout.server_args.mem_fraction_static",
    "rollout.enforce_eager": "rollout.server_args.disable_cuda_graph",
    "rollout.max_num_batched_tokens": "rollout.server_args.max_prefill_tokens",
    "rollout.max_num_seqs": "rollout.server_args.max_running_requests",
    "rollout.engine_kwargs.sglang": "rollout.server_args",
    "rollout.update_weights_bucket_megabytes": "rollout.sync_bucket_mb",
    "rollout.checkpoint_engine.update_weights_bucket_megabytes": "rollout.sync_bucket_mb",
    "rollout.over_sample_rate": "rollout.over_sampling",
    "actor.kl_loss.coef": "actor.kl_loss_coef",
    "actor.kl_loss.type": "actor.kl_loss_type",
    "algorithm.in_reward_kl.type": "algorithm.kl_penalty",
    "algorithm.in_reward_kl.coef": "algorithm.kl_ctrl.kl_coef",
    "algorithm.in_reward_kl.kl_ctrl": "algorithm.kl_ctrl",
    "actor_rollout_ref.nccl_timeout": "trainer.collective_timeout_s",
    "actor.nccl_timeout": "trainer.collective_timeout_s",
    "critic.nccl_timeout": "trainer.collective_timeout_s",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep": "trainer.max_ckpt_to_keep",
    "reward.reward_model": "reward_model",
    "reward_model.model.path": "reward_model.path",
    "reward_model.model_path": "reward_model.path",
    "reward_model.model.trust_remote_code": "model.trust_remote_code",
    "reward.sandbox_fusion": "reward_model.sandbox_fusion",
    "reward.reward_kwargs": "reward_model.reward_kwargs",
    "reward.custom_reward_function": "custom_reward_function",
    "custom_reward_function.reward_kwargs": "reward.kwargs",
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": "reward.overlong_buffer_len",
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": (
        "reward.overlong_penalty_factor"
    ),
    **{
        f"{role}.{old}": f"{role}.{new}"
        for role in ROLES
        for old, new in (
            ("ulysses_sequence_parallel_size", "megatron.context_parallel_size"),
            ("megatron.override_ddp_config.overlap_grad_reduce", "megatron.overlap_grad_reduce"),
            ("megatron.override_ddp_config.overlap_param_gather", "megatron.overlap_param_gather"),
        )
    },
    **{
        f"{role}.{old}": f"{role}.{new}"
        for role in ("actor", "critic")
        for old, new in (
            ("grad_clip", "optim.clip_grad"),
            ("optim.lr_warmup_style", "optim.lr_decay_style"),
            ("optim.warmup_style", "optim.lr_decay_style"),
            ("optim.lr_scheduler_type", "optim.lr_decay_style"),
        )
    },
    **{
        f"{role}.megatron.override_transformer_config.{name}": f"{role}.megatron.{name}"
        for role in ROLES
        for name in (
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "moe_router_dtype",
            "moe_token_dispatcher_type",
            "moe_aux_loss_coeff",
            "moe_z_loss_coeff",
            "moe_router_load_balancing_type",
            "moe_router_bias_update_rate",
            "moe_expert_capacity_factor",
        )
    },
}
"""The dotted name of a section or key to mppo's; applied in this order."""


def canonical_key(key: str) -> str:
    """mppo's name of a key given under any of its names."""
    for old, new in RENAMED.items():
        if f"{key}.".startswith(f"{old}."):
            key = new + key.removeprefix(old)
    return key

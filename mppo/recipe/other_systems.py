"""Keys of other systems: those that mppo has under another name, and those that only
``mppo-migrate`` translates."""

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


_VERL = """
    _target_ actor_rollout_ref agent_loop_config_path agent_loop_manager_class
    apply_chat_template_kwargs async_training audio_key automodel balance_batch calculate_entropy
    calculate_log_probs calculate_sum_pi_squared checkpoint checkpoint_engine
    controller_nsight_options cudagraph_capture_sizes custom_async_server custom_chat_template
    custom_cls custom_reward_function data_loader_seed data_parallel_size data_processor_config
    datagen dataloader_num_workers default_agent_loop default_hdfs_dir del_local_ckpt_after_load
    device disable_log_stats dist_checkpointing_path dist_checkpointing_prefix distillation
    do_sample enable_chunked_prefill enable_gradient_checkpointing enable_prefix_caching
    enable_resource_pool enable_rollout_routing_replay engine engine_kwargs entropy_checkpointing
    entropy_from_logits_with_chunking esi_redundant_time exclude_modules external_lib
    filter_overlong_prompts_workers forward_micro_batch_size free_cache_engine freeze_vision_tower
    fsdp fsdp_config fused_kernel_options gen_batch_size global_profiler grad_offload
    gradient_checkpointing_kwargs ignore_eos image_key image_patch_size inference
    launch_reward_fn_async layer_name_map layered_summon load_format load_weight
    log_prob_micro_batch_size log_val_generations logprobs_mode lora lora_adapter_path lora_alpha
    lora_rank loss_type lr_decay_steps lr_warmup_init lr_wsd_decay_steps lr_wsd_decay_style
    max_images_per_prompt max_model_len metric micro_batch_size mm_processor_kwargs model
    model_engine model_type moe_tensor_parallel_size mtp multi_stage_wake_up multi_turn nccl_timeout
    npu_profile num_workers optimizer_offload override_config override_ddp_config
    override_mcore_model_config override_optimizer_config param_offload ppo_micro_batch_size profile
    profile_discrete profile_ranks profile_ranks_all profile_steps profiler prometheus quantization
    ray_init ray_kwargs ray_wait_register_center_timeout remove_previous_ckpt_in_save
    return_full_prompt return_multi_modal_inputs return_raw_chat return_raw_input_ids reward_fn_key
    reward_kwargs reward_loop reward_manager rollout_data_dir rollout_n sampler sandbox_fusion
    sandbox_fusion_url scheduling_policy skip skip_rollout skip_tokenizer_init strategy
    sum_pi_squared_checkpointing target_modules target_parameters tis_imp_ratio_cap tool_config_path
    torchtitan total_rollout_steps trace train_max_samples use_checkpoint_opt_param_scheduler
    use_dist_checkpointing use_fused_kernels use_legacy_worker_impl use_liger use_mbridge
    use_megatron_fsdp use_prefix_grouper use_remove_padding use_reward_loop use_rmpad
    use_rollout_log_probs use_shm use_torch_compile use_v1 val_max_samples val_only
    validation_shuffle vanilla_mbridge veomni video_key weight_decay_incr_style
    worker_nsight_options
"""
_TRL = """
    adam_beta1 adam_beta2 adam_epsilon attn_implementation bf16 cliprange dataset_config
    dataset_name dataset_num_proc dataset_test_split dataset_train_split deepspeed
    ds3_gather_for_generation eval_steps eval_strategy exp_name fp16 gradient_accumulation_steps
    gradient_checkpointing hub_model_id kl_estimator learning_rate load_in_4bit load_in_8bit
    local_rollout_forward_batch_size logging_steps lora_dropout lora_r lora_target_modules
    lora_task_type lr_scheduler_type max_grad_norm max_prompt_token_len model_adapter_name
    model_name_or_path model_revision non_eos_penalty num_ppo_epochs num_train_epochs output_dir
    overwrite_output_dir penalty_reward_value per_device_eval_batch_size per_device_train_batch_size
    push_to_hub ref_adapter_name report_to response_length resume_from_checkpoint reward_model_path
    run_name save_steps save_strategy save_total_limit sft_model_path stop_token stop_token_id
    torch_dtype use_peft value_model vf_coef warmup_ratio warmup_steps
"""
FOREIGN_KEYS = {"verl": frozenset(_VERL.split()), "trl": frozenset(_TRL.split())}
"""By system, as ``mppo-migrate`` names it: the last parts of its keys that mppo does not have."""


def system_of(name: str) -> str | None:
    """The system that has a key with this last part, if mppo has none."""
    return next((system for system, names in FOREIGN_KEYS.items() if name in names), None)

"""verl's keys of models, roles and the algorithm, and what happens to each."""

from __future__ import annotations

from mppo_migrate.verl_keys.verl_row import (
    NO_PROFILER,
    NOTHING,
    OFF,
    PROFILER,
    TEXT_ONLY,
    Converted,
    Ignored,
    Refused,
    VerlRow,
)

_PACKED = Ignored("sequences are always packed; no padding is computed")
_MEGATRON = Ignored("every role runs on Megatron-Core; <role>.megatron.* is its layout")
_LORA = "LoRA is not supported: all weights are trained"
_DIST_CHECKPOINT = Refused(
    "model.path is read directly: no checkpoint has to be converted for Megatron first",
    "remove it; if that checkpoint holds other weights, name it in model.path, critic.path or "
    "ref.path",
)
_FROZEN = "the reference is not trained: it has weights alone"
_ADAM = Refused(
    "is not passed to Megatron's optimizer",
    "remove it; the keys of <role>.optim are those of the optimizer",
)
_OFFLOADS = {
    "param_offload": Converted("*.megatron.offload.parameters", {None: False}),
    "grad_offload": Converted("*.megatron.offload.gradients", {None: False}),
    "optimizer_offload": Converted("*.megatron.offload.optimizer", {None: False}),
}
_MICRO_BATCH = (
    "is a size over all ranks, which is divided by trainer.nnodes x trainer.n_gpus_per_node; "
    "n_gpus_per_node is not set"
)

ROLE_ROWS: tuple[VerlRow, ...] = (
    # model
    VerlRow("{model,critic.model}.{use_remove_padding,use_rmpad}", _PACKED),
    VerlRow(
        "model.enable_gradient_checkpointing",
        Converted("actor.megatron.recompute_granularity", {True: "full", False: "none"}),
    ),
    VerlRow(
        "critic.model.enable_gradient_checkpointing",
        Converted("critic.megatron.recompute_granularity", {True: "full", False: "none"}),
    ),
    VerlRow("{model,critic.model}.gradient_checkpointing_kwargs", _MEGATRON),
    VerlRow(
        "{model,critic.model}.{use_fused_kernels,fused_kernel_options,use_liger}",
        Ignored("log-probabilities are always computed from chunks of the logits"),
    ),
    VerlRow("{model,critic.model}.{use_shm,external_lib,custom_chat_template,mtp}", OFF, NOTHING),
    VerlRow("{model,critic.model}.{lora_rank,lora_adapter_path,lora}", OFF, NOTHING),
    VerlRow(
        "{model,critic.model}.{lora_rank,lora_adapter_path,lora}",
        Refused(_LORA, "remove it"),
    ),
    VerlRow(
        "{model,critic.model}.{lora_alpha,target_modules,exclude_modules,target_parameters}",
        Ignored(_LORA),
    ),
    VerlRow(
        "{model,critic.model}.use_shm",
        Refused(
            "models are read directly from model.path", "copy it to /dev/shm, name that folder"
        ),
    ),
    VerlRow(
        "model.custom_chat_template",
        Refused(
            "the tokenizer's own template is used",
            "write it into chat_template of the model's tokenizer_config.json",
        ),
    ),
    VerlRow("{model,critic.model}.override_config", OFF, NOTHING),
    VerlRow(
        "{model,critic.model}.override_config",
        Refused(
            "a model is built from its config.json",
            "edit config.json, or set <role>.megatron.override_transformer_config",
        ),
    ),
    VerlRow("critic.model.fsdp_config.param_offload", _OFFLOADS["param_offload"]),
    VerlRow("critic.model.fsdp_config.grad_offload", _OFFLOADS["grad_offload"]),
    VerlRow("critic.model.fsdp_config.optimizer_offload", _OFFLOADS["optimizer_offload"]),
    VerlRow("critic.model.fsdp_config", _MEGATRON),
    VerlRow("reward_model.model.fsdp_config.param_offload", _OFFLOADS["param_offload"]),
    # every role
    VerlRow(
        "{ref,reward_model}.{megatron,fsdp_config}.{grad_offload,optimizer_offload}",
        Ignored(_FROZEN),
        NOTHING,
    ),
    VerlRow(
        "{ref,reward_model}.{megatron,fsdp_config}.{grad_offload,optimizer_offload}",
        Refused(_FROZEN, "remove it; param_offload moves its weights"),
    ),
    VerlRow("*.{megatron,fsdp_config}.param_offload", _OFFLOADS["param_offload"]),
    VerlRow("*.{megatron,fsdp_config}.grad_offload", _OFFLOADS["grad_offload"]),
    VerlRow("*.{megatron,fsdp_config}.optimizer_offload", _OFFLOADS["optimizer_offload"]),
    VerlRow(
        "*.fsdp_config.{model_dtype,dtype}",
        Refused("all roles have the same dtype", "set model.dtype"),
    ),
    VerlRow("{actor,ref,critic}.{fsdp_config,strategy}", _MEGATRON),
    VerlRow("model_engine", _MEGATRON),
    VerlRow(
        "*.{ppo_micro_batch_size,log_prob_micro_batch_size,forward_micro_batch_size}", OFF, NOTHING
    ),
    VerlRow(
        "{actor,critic}.ppo_micro_batch_size",
        Refused(_MICRO_BATCH, "set <role>.ppo_micro_batch_size_per_gpu"),
    ),
    VerlRow(
        "{rollout,ref}.log_prob_micro_batch_size",
        Refused(_MICRO_BATCH, "set <role>.log_prob_micro_batch_size_per_gpu"),
    ),
    VerlRow(
        "critic.forward_micro_batch_size",
        Refused(_MICRO_BATCH, "set critic.log_prob_micro_batch_size_per_gpu"),
    ),
    VerlRow("*.megatron.{use_dist_checkpointing,dist_checkpointing_path}", OFF, NOTHING),
    VerlRow("*.megatron.{use_dist_checkpointing,dist_checkpointing_path}", _DIST_CHECKPOINT),
    VerlRow(
        "*.megatron.{use_mbridge,vanilla_mbridge,dist_checkpointing_prefix}",
        Ignored("mppo's parameter table converts weights between Hugging Face and Megatron"),
    ),
    VerlRow("*.megatron.{override_ddp_config,override_mcore_model_config}", OFF, NOTHING),
    VerlRow(
        "*.megatron.{override_ddp_config,override_mcore_model_config}",
        Refused(
            "is not passed to Megatron",
            "set <role>.megatron.overlap_grad_reduce or overlap_param_gather, or remove it",
        ),
    ),
    VerlRow(
        "*.megatron.override_transformer_config.recompute_granularity",
        Converted("*.megatron.recompute_granularity", {None: "none"}),
    ),
    VerlRow(
        "*.megatron.override_transformer_config.{recompute_method,recompute_num_layers}",
        Ignored("recompute_granularity: full recomputes every layer by itself (uniform, 1)"),
        (None, "uniform", 1),
    ),
    VerlRow("*.megatron.seed", Converted("trainer.seed")),
    VerlRow("*.megatron.dtype", Converted("model.dtype")),
    VerlRow(
        "*.megatron.expert_tensor_parallel_size",
        Converted("*.megatron.expert_tensor_parallel_size", {"None": None}),
        ("None",),
    ),
    VerlRow(
        "{actor,critic,ref}.{use_torch_compile,entropy_checkpointing}",
        Ignored("nothing is compiled; entropies are always recomputed"),
    ),
    VerlRow(
        "{actor,ref}.{entropy_from_logits_with_chunking,use_fused_kernels,calculate_entropy}",
        Ignored("log-probabilities and entropies are always computed from chunks of the logits"),
    ),
    VerlRow("*.checkpoint.async_save", Converted("trainer.async_save")),
    VerlRow(
        "{actor,critic}.checkpoint",
        Ignored(
            "a checkpoint holds model, optimizer and all other state of a run; "
            "trainer.checkpoint_hf: true also writes a Hugging Face folder"
        ),
    ),
    VerlRow("*.optim.lr_warmup_steps", Converted("*.optim.lr_warmup_steps", {-1: None}), (-1,)),
    VerlRow("*.optim.optimizer", Ignored("the optimizer is Adam"), ("adam", "AdamW", "adamw")),
    VerlRow("*.optim.optimizer", Refused("the optimizer is Adam", "remove it")),
    VerlRow("*.optim.override_optimizer_config", OFF, NOTHING),
    VerlRow(
        "*.optim.override_optimizer_config.optimizer_offload_fraction",
        Converted("*.optim.cpu_offload_fraction"),
    ),
    VerlRow(
        "*.optim.override_optimizer_config.optimizer_cpu_offload",
        Ignored("optimizer_offload_fraction, here cpu_offload_fraction, is the share"),
    ),
    VerlRow(
        "*.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d",
        Ignored("these copies always overlap"),
    ),
    VerlRow(
        "*.optim.override_optimizer_config.use_precision_aware_optimizer",
        Ignored("moments and main weights are float32"),
    ),
    VerlRow("*.optim.override_optimizer_config", _ADAM),
    VerlRow(
        "*.optim.{total_training_steps,lr_decay_steps}",
        Ignored("the schedule runs over the run's steps"),
        (None, -1),
    ),
    VerlRow(
        "*.optim.{total_training_steps,lr_decay_steps}",
        Refused("the schedule runs over the run's steps", "set trainer.total_training_steps"),
    ),
    VerlRow("*.optim.{lr_warmup_init,use_checkpoint_opt_param_scheduler}", OFF, NOTHING),
    VerlRow(
        "*.optim.lr_warmup_init", Refused("a warm-up starts at a learning rate of 0", "remove it")
    ),
    VerlRow(
        "*.optim.{weight_decay_incr_style,lr_wsd_decay_style,lr_wsd_decay_steps}",
        Ignored("weight decay is constant, and the schedule wsd is not supported"),
        (None, "constant", "exponential"),
    ),
    VerlRow(
        "{actor,critic}.{load_weight,data_loader_seed,rollout_n}",
        Ignored("follows from model.path, data.seed and rollout.n"),
    ),
    VerlRow("{actor,critic,ref}.{profile,profiler}", OFF, NOTHING),
    VerlRow(
        "*.{profile_ranks,profile_ranks_all,profile_discrete}",
        NO_PROFILER,
        NOTHING,
    ),
    VerlRow("*.{profile_ranks,profile_ranks_all,profile_discrete}", PROFILER),
    VerlRow("{actor_rollout_ref,reward_model,critic,actor,ref}.{profiler,profile}", PROFILER),
    VerlRow("global_profiler", PROFILER),
    VerlRow(
        "{actor,critic}.{ppo_micro_batch_size_per_gpu,ppo_max_token_len_per_gpu}",
        Ignored("the default is used"),
        (None,),
    ),
    # reward model
    VerlRow("reward_model.micro_batch_size", OFF, NOTHING),
    VerlRow(
        "reward_model.micro_batch_size",
        Refused(_MICRO_BATCH, "set reward_model.micro_batch_size_per_gpu"),
    ),
    VerlRow(
        "reward_model.{micro_batch_size_per_gpu,forward_max_token_len_per_gpu}",
        Ignored("the default is used"),
        (None,),
    ),
    VerlRow(
        "reward_model.model.input_tokenizer",
        Ignored("responses are decoded by the tokenizer of model.tokenizer_path"),
    ),
    VerlRow("reward_model.{model,strategy,param_offload,fsdp_config}", _MEGATRON),
    VerlRow(
        "reward_model.{inference,rollout,model_type,use_reward_loop,num_workers,load_weight,"
        "enable_resource_pool,n_gpus_per_node,nnodes,nccl_timeout,data_processor_config}",
        Ignored("the reward model runs on Megatron-Core in the ranks of the run"),
    ),
    # actor, reference, algorithm
    VerlRow(
        "actor.policy_loss.loss_mode",
        Converted("actor.policy_loss.loss_mode", {"geo_mean": "gmpo"}),
        ("geo_mean",),
    ),
    VerlRow(
        "actor.policy_loss.loss_mode",
        Ignored("algorithm.rollout_correction.bypass_mode turns it on"),
        ("bypass_mode",),
    ),
    VerlRow(
        "algorithm.rollout_correction.{rollout_is,rollout_rs}",
        Converted("algorithm.rollout_correction.{}", {None: "off"}),
        (None,),
    ),
    VerlRow("algorithm.rollout_correction.rollout_rs_threshold", OFF, (None,)),
    VerlRow(
        "algorithm.rollout_correction.loss_type",
        Converted("actor.policy_loss.loss_mode"),
        ("reinforce",),
    ),
    VerlRow(
        "algorithm.rollout_correction.loss_type",
        Ignored("actor.policy_loss.loss_mode is the loss in bypass_mode too"),
        (None, "ppo_clip"),
    ),
    VerlRow("actor.{tau_pos,tau_neg}", Converted("actor.policy_loss.{}")),
    VerlRow(
        "actor.router_replay.mode",
        Converted("actor.router_replay", {"disabled": "off", None: "off"}),
    ),
    VerlRow("actor.router_replay.{record_file,replay_file}", OFF, NOTHING),
    VerlRow(
        "actor.{calculate_sum_pi_squared,sum_pi_squared_checkpointing}",
        Ignored("the sum is computed where algorithm.adv_estimator needs it"),
    ),
    VerlRow("actor.{use_rollout_log_probs,use_prefix_grouper}", OFF, NOTHING),
    VerlRow(
        "actor.{use_rollout_log_probs,tis_imp_ratio_cap}",
        Refused("has another name in mppo", "set algorithm.rollout_correction.*"),
    ),
    VerlRow("actor.freeze_vision_tower", TEXT_ONLY),
    VerlRow("actor_rollout_ref.hybrid_engine", Ignored("rollout.mode decides it"), (True,)),
    VerlRow(
        "actor_rollout_ref.hybrid_engine",
        Refused(
            "servers that run elsewhere are given by address",
            "set rollout.mode: disaggregated and rollout.urls",
        ),
    ),
    VerlRow(
        "algorithm.adv_estimator",
        Converted("algorithm.adv_estimator", {"grpo_vectorized": "grpo"}),
        ("grpo_vectorized",),
    ),
    VerlRow(
        "algorithm.filter_groups.metric", Ignored("groups are compared by score"), (None, "score")
    ),
    VerlRow(
        "algorithm.filter_groups.metric",
        Refused("algorithm.filter_groups compares the scores of a group", "remove it"),
    ),
    VerlRow(
        "algorithm.{rollout_is,rollout_is_threshold,rollout_rs}",
        Refused("has another name in mppo", "set algorithm.rollout_correction.*"),
    ),
    VerlRow(
        "{actor,critic,algorithm,algorithm.kl_ctrl,algorithm.pf_ppo}._target_",
        Ignored("it names a class of verl"),
    ),
    VerlRow("critic.enable", Ignored("the critic is built for adv_estimator: gae only")),
)

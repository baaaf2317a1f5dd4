"""verl's names for keys that live elsewhere in this recipe, or nowhere.

``MOVED`` is rewritten on reading. ``ADVICE`` names keys that have no meaning here and what to do
instead; they are refused, for nothing in a recipe is silently ignored.
"""

from __future__ import annotations

MOVED: dict[str, str] = {
    "actor_rollout_ref.actor": "actor",
    "actor_rollout_ref.rollout": "rollout",
    "actor_rollout_ref.ref": "ref",
    "actor_rollout_ref.model": "model",
    "critic.model.path": "critic.path",
    "critic.model.tokenizer_path": "model.tokenizer_path",
    "critic.forward_micro_batch_size_per_gpu": "critic.log_prob_micro_batch_size_per_gpu",
    "critic.forward_max_token_len_per_gpu": "critic.log_prob_max_token_len_per_gpu",
    "rollout.log_prob_micro_batch_size_per_gpu": "actor.log_prob_micro_batch_size_per_gpu",
    "rollout.log_prob_max_token_len_per_gpu": "actor.log_prob_max_token_len_per_gpu",
}
"""verl's dotted name (a section or a key) to ours; applied in this order."""

ADVICE: dict[str, str] = {
    "use_remove_padding": "remove it: sequences are always packed, no padding is computed",
    "enable_gradient_checkpointing": "set <role>.megatron.recompute_granularity: selective or full",
    "fsdp_config": "set <role>.megatron.*: every role runs on Megatron-Core",
    "strategy": "remove it: every role runs on Megatron-Core",
    "ulysses_sequence_parallel_size": "set <role>.megatron.context_parallel_size",
    "grad_clip": "set <role>.optim.clip_grad",
    "gpu_memory_utilization": "set rollout.server_args.mem_fraction_static (SGLang's name)",
    "enforce_eager": "set rollout.server_args.disable_cuda_graph (SGLang's name)",
    "enable_chunked_prefill": "set rollout.server_args.chunked_prefill_size (SGLang's name)",
    "free_cache_engine": "remove it: the engine sleeps while the models train",
    "max_num_batched_tokens": "set rollout.server_args.max_prefill_tokens (SGLang's name)",
    "max_num_seqs": "set rollout.server_args.max_running_requests (SGLang's name)",
    "ppo_micro_batch_size": "set <role>.ppo_micro_batch_size_per_gpu",
    "log_prob_micro_batch_size": "set <role>.log_prob_micro_batch_size_per_gpu",
    "custom_reward_function": "set reward.name: function and reward.function: module.or.file:name",
    "metric": "remove it: algorithm.filter_groups compares the scores of a group",
    "reward_model": "set reward.*: rule, function or remote",
    "return_raw_chat": "remove it: a chat prompt is kept as it is in the data file",
    "override_config": "set <role>.megatron.override_transformer_config, or edit config.json",
    "use_dist_checkpointing": "remove it: checkpoints are Megatron's distributed ones",
    "dist_checkpointing_path": "set model.path, critic.path or ref.path to the checkpoint",
    "nccl_timeout": "set trainer.collective_timeout_s",
    "vllm": "set rollout.name: sglang or local",
}
"""Last part of a verl key that has no counterpart, to the cure."""

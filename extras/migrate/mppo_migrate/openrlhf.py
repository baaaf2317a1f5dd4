"""OpenRLHF's ``train_ppo`` and ``train_ppo_ray``.

Source: OpenRLHF 0.1 to 0.9, ``train_ppo.py`` and ``cli/train_ppo_ray.py``; ``openrlhf_dotted`` has
the flags since 0.10.
"""

from __future__ import annotations

from collections.abc import Iterator

from mppo_migrate.openrlhf_dotted import DOTTED, OWN, derive_dotted
from mppo_migrate.row import Flags, Operand, Setting, System, Without, to, when
from mppo_migrate.values import both, data_set_files, dtype, given, mixed_data_sets, pair

_DEEPSPEED = Without("<role>.megatron.* is the layout; there is no DeepSpeed")
_GPUS = Without("every role runs on all ranks; <role>.megatron.* is its layout")
_VLLM = Without("the engine is SGLang; rollout.server_args has its options")
_LORA = Without("LoRA is not supported: all weights are trained")
_RAY = Without("mppo does not use Ray: torchrun, srun or mpirun starts the ranks")
_AUTOMATIC = Without("chosen automatically")
_TRACKER = Without("trainer.project_name and trainer.experiment_name are the names in trackers")


_ESTIMATORS = {
    "reinforce": "reinforce_plus_plus", "reinforce_baseline": "reinforce_plus_plus_baseline",
    "group_norm": "grpo",
}  # fmt: skip

ROWS = {
    "pretrain": to("model.path"),
    "critic_pretrain": to("critic.path"),
    "reward_pretrain": Operand(),
    "remote_rm_url": Operand(),
    "reward_model_path": Without("an old form of reward_pretrain; set reward_model.path"),
    "sft_model_path": Without("weights in OpenRLHF's old .pt form; name a Hugging Face folder"),
    "prompt_data": Operand(),
    "prompt_split": Operand(),
    "prompt_data_probs": Operand(),
    "dataset": Operand(),
    "dataset_probs": Operand(),
    "eval_dataset": Operand(),
    "eval_split": Operand(),
    "eval_steps": to("trainer.test_freq"),
    "eval_n_samples_per_prompt": to("rollout.val_kwargs.n"),
    "eval_temperature": to("rollout.val_kwargs.temperature"),
    "input_key": to("data.prompt_key"),
    "label_key": to("data.answer_key"),
    "input_template": Without("write the prompts with the template, or use apply_chat_template"),
    "apply_chat_template": Operand(False),
    "pretrain_data": Operand(),
    "pretrain_split": Operand(),
    "ptx_coef": to("actor.ptx_coef"),
    "num_episodes": to("trainer.total_epochs"),
    "rollout_batch_size": to("data.train_batch_size"),
    "train_batch_size": Operand(128),
    "n_samples_per_prompt": Operand(1),
    "micro_train_batch_size": to(*both("ppo_micro_batch_size_per_gpu")),
    "micro_rollout_batch_size": to("actor.log_prob_micro_batch_size_per_gpu"),
    "use_dynamic_batch": to(*both("use_dynamic_bsz")),
    "train_max_tokens_per_gpu": to(*both("ppo_max_token_len_per_gpu")),
    "rollout_max_tokens_per_gpu": to(*both("log_prob_max_token_len_per_gpu")),
    "max_epochs": to(*both("ppo_epochs")),
    "max_samples": to("data.train_size"),
    "prompt_max_len": to("data.max_prompt_length"),
    "generate_max_len": to("data.max_response_length"),
    "max_len": Without("the sum of data.max_prompt_length and data.max_response_length"),
    "max_norm": to(*both("optim.clip_grad")),
    "l2": to(*both("optim.weight_decay")),
    "adam_betas": to(*both("optim.betas"), convert=pair),
    "lr_warmup_ratio": to(*both("optim.lr_warmup_steps_ratio")),
    "lr_scheduler": Without("the preset has OpenRLHF's: cosine decay to a tenth"),
    "actor_learning_rate": to("actor.optim.lr"),
    "critic_learning_rate": to("critic.optim.lr"),
    "eps_clip": to("actor.clip_ratio"),
    "value_clip": to("critic.cliprange_value"),
    "lambd": to("algorithm.lam"),
    "gamma": to("algorithm.gamma"),
    "init_kl_coef": to("algorithm.kl_ctrl.kl_coef"),
    "kl_target": Operand(),
    "kl_horizon": to("algorithm.kl_ctrl.horizon"),
    "kl_estimator": to("algorithm.kl_penalty"),
    "use_kl_estimator_k3": when("algorithm.kl_penalty", true="k3", false="k1"),
    "use_kl_loss": to("actor.use_kl_loss"),
    "kl_loss_coef": to("actor.kl_loss_coef"),
    "entropy_loss_coef": to("actor.entropy_coeff"),
    "advantage_estimator": to(
        "algorithm.adv_estimator", convert=lambda name: _ESTIMATORS.get(str(name), name)
    ),
    "normalize_reward": Operand(False),
    "reward_clip_range": Without("the preset clips to 10; set reward.clip"),
    "freezing_actor_steps": to("trainer.critic_warmup"),
    "enable_ema": when("actor.ema_decay", true=0.992),
    "ema_beta": to("actor.ema_decay"),
    "aux_loss_coef": Operand(),
    "top_p": to("rollout.top_p"),
    "temperature": to("rollout.temperature"),
    "bf16": when("model.dtype", true="bfloat16", false="float32"),
    "param_dtype": to("model.dtype", convert=dtype),
    "gradient_checkpointing": when(
        *both("megatron.recompute_granularity"), true="full", false="none"
    ),
    "gradient_checkpointing_use_reentrant": _AUTOMATIC,
    "ring_attn_size": to(*both("megatron.context_parallel_size")),
    "ds_tensor_parallel_size": to(*both("megatron.tensor_model_parallel_size")),
    "vllm_num_engines": to("rollout.servers"),
    "vllm_tensor_parallel_size": to("rollout.tensor_model_parallel_size"),
    "vllm_gpu_memory_utilization": to("rollout.server_args.mem_fraction_static"),
    "enforce_eager": to("rollout.server_args.disable_cuda_graph"),
    "save_path": to("trainer.default_local_dir"),
    "ckpt_path": Without("checkpoints are in the run folder, trainer.default_local_dir"),
    "save_steps": to("trainer.save_freq"),
    "max_ckpt_num": to("trainer.max_ckpt_to_keep"),
    "save_hf_ckpt": to("trainer.checkpoint_hf"),
    "load_checkpoint": Without("a run continues from its newest checkpoint by itself"),
    "logging_steps": Without("metrics are written in every step"),
    "seed": to("trainer.seed"),
    "use_wandb": when("trainer.logger", true=["console", "jsonl", "wandb"], false=["console"]),
    "use_tensorboard": when(
        "trainer.logger", true=["console", "jsonl", "tensorboard"], false=["console"]
    ),
    "wandb_project": to("trainer.project_name"),
    "wandb_run_name": to("trainer.experiment_name"),
    "wandb_org": _TRACKER,
    "wandb_group": _TRACKER,
    "actor_num_nodes": Operand(1),
    "actor_num_gpus_per_node": Operand(8),
    "critic_num_nodes": Operand(1),
    "critic_num_gpus_per_node": Operand(8),
    "ref_num_nodes": Operand(1),
    "ref_num_gpus_per_node": Operand(8),
    "reward_num_nodes": Operand(1),
    "reward_num_gpus_per_node": Operand(8),
    "colocate_all_models": Operand(False),
    "colocate_actor_ref": Operand(False),
    "colocate_critic_reward": Operand(False),
    "ref_reward_offload": when(
        *(f"{role}.megatron.offload.parameters" for role in ("ref", "reward_model")),
        true=True, false=False,
    ),
    "adam_offload": when(*both("optim.cpu_offload_fraction"), true=1.0, false=0.0),
    "async_train": _GPUS,
    "packing_samples": Without("sequences are always packed; no padding is computed"),
    **{
        name: _VLLM
        for name in (
            "vllm_sync_backend", "vllm_sync_with_ray", "vllm_enable_sleep", "enable_prefix_caching",
            "vllm_enforce_eager", "enable_vllm_is_correction", "full_determinism",
        )
    },
    **{
        name: _DEEPSPEED
        for name in (
            "zero_stage", "zpg", "grad_accum_dtype", "disable_trace_cache",
            "deepspeed_enable_sleep", "overlap_comm", "deepcompile", "use_ds_universal_ckpt",
            "inference_tp_size", "disable_fast_tokenizer", "ring_head_stride",
        )
    },
    **{name: _AUTOMATIC for name in ("flash_attn", "attn_implementation", "actor_init_on_gpu",
                                     "local_rank")},
    **{name: _LORA for name in ("lora_rank", "lora_alpha", "lora_dropout", "target_modules",
                                "load_in_4bit")},
}  # fmt: skip


ROWS |= OWN | {dotted: ROWS[name] for dotted, name in DOTTED.items()}


def _derive(flags: Flags) -> Iterator[Setting]:
    """Ranks, mini-batch, data, reward and KL."""
    if flags.dotted:
        yield from derive_dotted(flags)
    samples, size = flags.get("n_samples_per_prompt"), flags.get("train_batch_size")
    yield Setting("rollout.n", samples, "--n_samples_per_prompt")
    origin = f"--train_batch_size {size} counts samples, {samples} a prompt"
    yield Setting("actor.ppo_mini_batch_size", max(1, size // samples), origin)
    yield from _data_sets(flags)
    template = flags.get("apply_chat_template") is True
    yield Setting("data.apply_chat_template", template, "--apply_chat_template")
    if "reward_pretrain" in flags and "critic_pretrain" not in flags:
        origin = "--reward_pretrain: OpenRLHF's critic starts from it"
        yield Setting("critic.path", flags.get("reward_pretrain"), origin)
    if flags.get("remote_rm_url"):
        yield from _reward(str(flags.get("remote_rm_url")))
    elif "reward_pretrain" in flags:
        yield Setting("reward_model.path", flags.get("reward_pretrain"), "--reward_pretrain")
        if "normalize_reward" in flags:
            origin = "--normalize_reward: mean and std of the reward model's config.json"
            yield Setting("reward_model.normalize.mode", "config", origin)
    if flags.get("kl_target"):
        yield Setting("algorithm.kl_ctrl.type", "adaptive", "--kl_target")
        yield Setting("algorithm.kl_ctrl.target_kl", flags.get("kl_target"), "--kl_target")
    if flags.get("aux_loss_coef"):
        section = "actor.megatron.moe"
        yield Setting(f"{section}_aux_loss_coeff", flags.get("aux_loss_coef"), "--aux_loss_coef")
        yield Setting(f"{section}_router_load_balancing_type", "aux_loss", "--aux_loss_coef")


def _data_sets(flags: Flags) -> Iterator[Setting]:
    """Prompts for training and validation, and plain text."""
    name = "prompt_data" if flags.get("prompt_data") else "dataset"
    weights, data = flags.get(f"{name}_probs"), flags.get(name)
    if data and weights:
        yield from mixed_data_sets(data, weights, f"--{name}, --{name}_probs")
    elif data:
        origin = given(flags, name, "prompt_split")
        split = flags.get("prompt_split")
        yield from data_set_files("data.train_files", data, origin, split=split)
    for flag, key in (("eval_dataset", "data.val_files"), ("pretrain_data", "data.ptx_files")):
        if flags.get(flag):
            part = f"{flag.partition('_')[0]}_split"
            origin = given(flags, flag, part)
            yield from data_set_files(key, flags.get(flag), origin, split=flags.get(part))


def _reward(url: str) -> Iterator[Setting]:
    if url.endswith(".py"):
        origin = "--remote_rm_url; its arguments differ: docs/data_and_rewards.md has mppo's"
        yield Setting("reward.name", "function", "--remote_rm_url")
        yield Setting("reward.function", f"{url}:reward_func", origin)
    else:
        yield Setting("reward.name", "remote", "--remote_rm_url")
        yield Setting("reward.format", "openrlhf", "--remote_rm_url")
        yield Setting("reward.url", url.split(",")[0], "--remote_rm_url")


def ranks(flags: Flags) -> int:
    """GPUs of a Ray command: those of all roles that do not share any; 0 for another command."""

    def gpus(role: str) -> int:
        return flags.get(f"{role}_num_nodes") * flags.get(f"{role}_num_gpus_per_node")

    if "actor_num_gpus_per_node" not in flags:
        return 0
    total = gpus("actor")
    if "colocate_all_models" in flags:
        return total
    total += gpus("critic")
    total += 0 if "colocate_actor_ref" in flags else gpus("ref")
    total += 0 if "colocate_critic_reward" in flags else gpus("reward")
    engines = flags.values.get("vllm_num_engines"), flags.values.get("vllm_tensor_parallel_size", 1)
    if all(type(number) is int and number > 0 for number in engines):
        total += engines[0] * engines[1]
    return total


SYSTEM = System(
    title="OpenRLHF",
    preset="openrlhf",
    programs=(r"openrlhf\.cli\.train_ppo(_ray)?", r"(.*/)?train_ppo(_ray)?\.py"),
    rows=ROWS,
    dotted=DOTTED,
    derive=_derive,
    reward_model="reward_pretrain",
    ranks=ranks,
    extra=(Setting("rollout.name", "sglang", "vLLM is not supported"),),
)

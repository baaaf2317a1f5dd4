"""OpenRLHF's flags since 0.10, grouped by dots: ``--actor.adam.lr`` was ``--actor_learning_rate``.

Source: OpenRLHF 0.10 and 0.11, ``cli/train_ppo_ray.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

from mppo_migrate.row import Flags, Operand, Row, Setting, Without, to, when
from mppo_migrate.values import decay, pair

DOTTED: dict[str, str] = {
    **{
        f"{role}.{name}": f"{role}_{name}"
        for role in ("actor", "critic", "ref", "reward")
        for name in ("num_nodes", "num_gpus_per_node")
    },
    **{
        f"vllm.{name}": f"vllm_{name}"
        for name in ("num_engines", "tensor_parallel_size", "sync_backend", "sync_with_ray",
                     "enable_sleep", "gpu_memory_utilization")
    },
    "vllm.enable_prefix_caching": "enable_prefix_caching",
    "vllm.enforce_eager": "enforce_eager",
    "train.colocate_actor_ref": "colocate_actor_ref",
    "train.colocate_critic_reward": "colocate_critic_reward",
    "train.colocate_all": "colocate_all_models",
    "train.async_enable": "async_train",
    "train.batch_size": "train_batch_size",
    "train.micro_batch_size": "micro_train_batch_size",
    "train.dynamic_batch_enable": "use_dynamic_batch",
    "train.max_tokens_per_gpu": "train_max_tokens_per_gpu",
    "train.max_epochs": "max_epochs",
    "train.num_episodes": "num_episodes",
    "train.seed": "seed",
    "train.full_determinism_enable": "full_determinism",
    "train.enable_ema": "enable_ema",
    "train.ema_beta": "ema_beta",
    "rollout.batch_size": "rollout_batch_size",
    "rollout.micro_batch_size": "micro_rollout_batch_size",
    "rollout.max_tokens_per_gpu": "rollout_max_tokens_per_gpu",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt",
    "rollout.top_p": "top_p",
    "rollout.temperature": "temperature",
    "data.max_samples": "max_samples",
    "data.prompt_dataset": "prompt_data",
    "data.prompt_probs": "prompt_data_probs",
    "data.prompt_split": "prompt_split",
    "data.input_key": "input_key",
    "data.label_key": "label_key",
    "data.input_template": "input_template",
    "data.apply_chat_template": "apply_chat_template",
    "data.disable_fast_tokenizer": "disable_fast_tokenizer",
    "eval.dataset": "eval_dataset",
    "eval.split": "eval_split",
    "eval.steps": "eval_steps",
    "eval.temperature": "eval_temperature",
    "eval.n_samples_per_prompt": "eval_n_samples_per_prompt",
    "ckpt.output_dir": "save_path",
    "ckpt.path": "ckpt_path",
    "ckpt.save_steps": "save_steps",
    "ckpt.save_hf": "save_hf_ckpt",
    "ckpt.max_num": "max_ckpt_num",
    "ckpt.load_enable": "load_checkpoint",
    "logger.logging_steps": "logging_steps",
    "logger.wandb.key": "use_wandb",
    "logger.wandb.org": "wandb_org",
    "logger.wandb.group": "wandb_group",
    "logger.wandb.project": "wandb_project",
    "logger.wandb.run_name": "wandb_run_name",
    "logger.tensorboard_dir": "use_tensorboard",
    "actor.model_name_or_path": "pretrain",
    "critic.model_name_or_path": "critic_pretrain",
    "reward.model_name_or_path": "reward_pretrain",
    "reward.remote_url": "remote_rm_url",
    "reward.normalize_enable": "normalize_reward",
    "reward.clip_range": "reward_clip_range",
    "actor.adam.lr": "actor_learning_rate",
    "critic.adam.lr": "critic_learning_rate",
    "actor.eps_clip": "eps_clip",
    "actor.aux_loss_coef": "aux_loss_coef",
    "actor.entropy_coef": "entropy_loss_coef",
    "actor.gradient_checkpointing_enable": "gradient_checkpointing",
    "actor.gradient_checkpointing_reentrant": "gradient_checkpointing_use_reentrant",
    "critic.value_clip": "value_clip",
    "critic.freezing_steps": "freezing_actor_steps",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.target": "kl_target",
    "algo.kl.horizon": "kl_horizon",
    "algo.kl.estimator": "kl_estimator",
    "algo.kl.use_loss": "use_kl_loss",
    "algo.advantage.estimator": "advantage_estimator",
    "algo.advantage.lambd": "lambd",
    "algo.advantage.gamma": "gamma",
    "ds.param_dtype": "param_dtype",
    "ds.adam_offload": "adam_offload",
    "ds.attn_implementation": "attn_implementation",
    "ds.packing_samples": "packing_samples",
    "ds.tensor_parallel_size": "ds_tensor_parallel_size",
    "ds.ring_attn_size": "ring_attn_size",
    "ds.ring_attn_head_stride": "ring_head_stride",
    "ds.enable_sleep": "deepspeed_enable_sleep",
    "ds.use_universal_ckpt": "use_ds_universal_ckpt",
    "ds.load_in_4bit": "load_in_4bit",
    **{f"ds.{name}": name for name in ("zero_stage", "zpg", "grad_accum_dtype", "overlap_comm",
                                       "deepcompile")},
    **{f"ds.lora.{name}": f"lora_{name}" for name in ("rank", "alpha", "dropout")},
    "ds.lora.target_modules": "target_modules",
}  # fmt: skip
"""The flags that had another name before, with that name."""

_TEXT_ONLY = Without("prompts are text; images are not supported")
_AHEAD = Without("docs/rollout.md: generation during training")
_OFFLOAD = "megatron.offload.parameters"

OWN: dict[str, Row] = {
    "data.max_len": Operand(2048),
    "rollout.max_new_tokens": Operand(),
    "rollout.vllm_generate_batch_size": Without("more prompts are requested as they are needed"),
    "data.dataloader_num_workers": Without("prompts are read once, when the run starts"),
    "data.image_key": _TEXT_ONLY,
    "data.max_images_per_prompt": _TEXT_ONLY,
    "actor.freeze_visual_encoder": _TEXT_ONLY,
    "train.async_queue_size": _AHEAD,
    "train.partial_rollout_enable": _AHEAD,
    "train.agent_func_path": Without("an agent has another form: rollout.agent.path"),
    "actor.eps_clip_low_high": Operand(),
    "actor.dual_clip": to("actor.clip_ratio_c"),
    "actor.policy_loss_type": to(
        "actor.policy_loss.loss_mode", convert=lambda name: {"ppo": "vanilla"}.get(name, name)
    ),
    "critic.save_value_network": Without("checkpoints hold the critic"),
    "algo.advantage.no_std_norm": when("algorithm.norm_adv_by_std_in_grpo", true=False, false=True),
    "algo.advantage.is_correction_enable": Operand(False),
    "algo.advantage.is_correction_type": Operand("tis"),
    "algo.advantage.is_correction_threshold": Operand(),
    "algo.dynamic_filtering_enable": to("algorithm.filter_groups.enable"),
    "algo.dynamic_filtering_range": Without("groups whose scores are not all equal are kept"),
    "reward.overlong_buffer_len": to("reward.overlong_buffer_len", convert=int),
    "reward.overlong_penalty_factor": to("reward.overlong_penalty_factor"),
    "reward.stop_properly_penalty_coef": Without(
        "no counterpart: reward.missing_eos_penalty is subtracted, reward.missing_eos_score "
        "replaces the score"
    ),
    "ref.offload": when(f"ref.{_OFFLOAD}", true=True, false=False),
    "reward.offload": when(f"reward_model.{_OFFLOAD}", true=True, false=False),
    "ds.value_head_prefix": Without("a value head is found by its shape and name"),
    "ds.use_liger_kernel": Without("chosen automatically"),
    "ds.experts_implementation": Without("chosen automatically"),
    "ckpt.disable_ds": Without("set trainer.save_freq: -1 to save none"),
    "ckpt.max_mem": Without("trainer.max_ckpt_to_keep limits checkpoints by number"),
    "ckpt.best_metric_key": Without("the newest checkpoints are kept"),
    "use_ms": Without("models come from a folder or the Hugging Face Hub"),
}
"""Flags that had no other name."""

for _role in ("actor", "critic"):
    OWN |= {
        f"{_role}.optim": Operand("adam"),
        f"{_role}.adam.betas": to(f"{_role}.optim.betas", convert=pair),
        f"{_role}.adam.eps": to(f"{_role}.optim.eps"),
        f"{_role}.adam.weight_decay": to(f"{_role}.optim.weight_decay"),
        f"{_role}.lr_scheduler": to(f"{_role}.optim.lr_decay_style", convert=decay),
        f"{_role}.lr_warmup_ratio": to(f"{_role}.optim.lr_warmup_steps_ratio"),
        f"{_role}.min_lr_ratio": Operand(),
        f"{_role}.max_norm": to(f"{_role}.optim.clip_grad"),
        **{
            f"{_role}.muon.{name}": Without("the optimizer is Adam")
            for name in ("lr", "momentum", "ns_steps", "nesterov", "no_nesterov")
        },
    }

_DEFAULTS = {
    "init_kl_coef": ("algorithm.kl_ctrl.kl_coef", 0.01),
    "lambd": ("algorithm.lam", 1.0),
    "value_clip": ("critic.cliprange_value", 0.5),
    "rollout_batch_size": ("data.train_batch_size", 1024),
}
"""Defaults of 0.10 that are not those of the preset, by flag."""


def derive_dotted(flags: Flags) -> Iterator[Setting]:
    """What follows from several of the dotted flags, and their defaults."""
    for name, (key, value) in _DEFAULTS.items():
        if name not in flags.values:
            yield Setting(key, value, "OpenRLHF's default since 0.10")
    yield from _lengths(flags)
    clips = flags.get("actor.eps_clip_low_high")
    if isinstance(clips, list) and len(clips) == 2:
        for name, value in zip(("low", "high"), clips):
            yield Setting(f"actor.clip_ratio_{name}", value, "--actor.eps_clip_low_high")
    for role, lr in (("actor", 1e-6), ("critic", 9e-6)):
        if flags.get(f"{role}.optim") != "adam":
            flags.problems.append((f"{role}.optim", "the optimizer is Adam"))
        share = flags.get(f"{role}.min_lr_ratio")
        lr = flags.values.get(f"{role}_learning_rate", lr)
        if isinstance(share, int | float) and isinstance(lr, int | float):
            yield Setting(f"{role}.optim.min_lr", share * lr, f"--{role}.min_lr_ratio")
    if flags.get("algo.advantage.is_correction_enable"):
        yield from _correction(flags)


def _lengths(flags: Flags) -> Iterator[Setting]:
    """OpenRLHF limits the sum of prompt and response; a recipe has a limit for each."""
    total, response = flags.get("data.max_len"), flags.get("rollout.max_new_tokens")
    origin = f"--data.max_len {total} limits prompt and response together"
    if not isinstance(response, int):
        response, origin = total // 2, f"{origin}: half of it for each"
    yield Setting("data.max_prompt_length", max(1, total - response), origin)
    yield Setting("data.max_response_length", response, "--rollout.max_new_tokens")


def _correction(flags: Flags) -> Iterator[Setting]:
    """Weights against vLLM's probabilities."""
    section, kind = "algorithm.rollout_correction", flags.get("algo.advantage.is_correction_type")
    given = flags.get("algo.advantage.is_correction_threshold")
    low, high = given if isinstance(given, list) and len(given) == 2 else (0.5, 5.0)
    origin = "--algo.advantage.is_correction_enable, is_correction_type, is_correction_threshold"
    yield Setting(f"{section}.rollout_is", "token", origin)
    if kind == "seq-mask-tis":
        # its bounds are those of the sequence's geometric mean, as a ratio of actor to engine
        yield Setting(f"{section}.rollout_is_threshold", 1e9, "no bound")
        yield Setting(f"{section}.rollout_rs", ["geometric"], origin)
        yield Setting(f"{section}.rollout_rs_threshold_lower", [1 / high], origin)
        yield Setting(f"{section}.rollout_rs_threshold", [1 / low], origin)
        return
    yield Setting(f"{section}.rollout_is_mode", "mask" if kind == "icepop" else "truncate", origin)
    yield Setting(f"{section}.rollout_is_lower", low, origin)
    yield Setting(f"{section}.rollout_is_threshold", high, origin)

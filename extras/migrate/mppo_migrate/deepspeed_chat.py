"""DeepSpeed-Chat, step 3: ``main.py``.

Source: DeepSpeedExamples, ``step3_rlhf_finetuning/main.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

from mppo_migrate.row import Flags, Operand, Setting, System, Without, to, when
from mppo_migrate.values import both, data_set_files, decay, dtype, given

_DEEPSPEED = Without("<role>.megatron.* is the layout; there is no DeepSpeed")
_LORA = Without("LoRA is not supported: all weights are trained")
_DROPOUT = Without("dropout is not supported")


ROWS = {
    "actor_model_name_or_path": to("model.path"),
    "critic_model_name_or_path": to("critic.path", "reward_model.path"),
    "data_path": Operand(),
    "data_split": Without("choose the rows of step 3 when the file is written"),
    "data_output_path": Without("prompts are read from data.train_files directly"),
    "unsupervised_dataset_name": Operand(),
    "unsupervised_dataset_config_name": Operand(),
    "unsup_coef": to("actor.ptx_coef"),
    "num_padding_at_beginning": Without("sequences are always packed; no padding is computed"),
    "per_device_generation_batch_size": Operand(16),
    "per_device_training_batch_size": Operand(16),
    "per_device_train_batch_size": Without("an old name; it is not used"),
    "per_device_mini_train_batch_size": Operand(16),
    "generation_batches": Operand(1),
    "generation_batch_numbers": Operand(1),
    "gradient_accumulation_steps": Operand(1),
    "ppo_epochs": to(*both("ppo_epochs")),
    "max_prompt_seq_len": to("data.max_prompt_length"),
    "max_answer_seq_len": to("data.max_response_length"),
    "actor_learning_rate": to("actor.optim.lr"),
    "critic_learning_rate": to("critic.optim.lr"),
    "actor_weight_decay": to("actor.optim.weight_decay"),
    "critic_weight_decay": to("critic.optim.weight_decay"),
    "lr_scheduler_type": to(*both("optim.lr_decay_style"), convert=decay),
    "num_warmup_steps": to(*both("optim.lr_warmup_steps")),
    "num_train_epochs": to("trainer.total_epochs"),
    "output_dir": to("trainer.default_local_dir"),
    "seed": to("trainer.seed"),
    "dtype": to("model.dtype", convert=dtype),
    "kl_ctl": to("algorithm.kl_ctrl.kl_coef"),
    "cliprange": to("actor.clip_ratio"),
    "cliprange_value": to("critic.cliprange_value"),
    "clip_reward_value": to("reward.clip"),
    "gamma": to("algorithm.gamma"),
    "lam": to("algorithm.lam"),
    "enable_ema": when("actor.ema_decay", true=0.992),
    "align_overflow": to("trainer.align_overflow"),
    "print_answers": when("trainer.sample_table_rows", true=4, false=0),
    "print_answers_interval": Without("trainer.num_sample_generations says how often"),
    "actor_gradient_checkpointing": when(
        "actor.megatron.recompute_granularity", true="full", false="none"
    ),
    "critic_gradient_checkpointing": when(
        "critic.megatron.recompute_granularity", true="full", false="none"
    ),
    "actor_zero_stage": Operand(),
    "critic_zero_stage": Operand(),
    "inference_tp_size": to("rollout.tensor_model_parallel_size"),
    "offload": when(*both("optim.cpu_offload_fraction"), true=1.0, false=0.0),
    "offload_reference_model": when("ref.megatron.offload.parameters", true=True, false=False),
    "enable_hybrid_engine": Without("rollout.mode: colocated is the default"),
    "enable_tensorboard": when(
        "trainer.logger", true=["console", "jsonl", "tensorboard"], false=["console", "jsonl"]
    ),
    "tensorboard_path": Without("TensorBoard's files are in the run folder"),
    "enable_test_mode": Operand(False),
    "test_stop_step": Operand(),
    "add_eot_token": Without("the tokenizer's own special tokens are used"),
    "end_of_conversation_token": Without("set rollout.stop_token_ids"),
    "local_rank": Without("chosen automatically"),
    **{
        name: _DEEPSPEED
        for name in (
            "deepspeed", "deepspeed_config", "unpin_actor_parameters", "release_inference_cache",
            "tp_gather_partition_size", "enable_mixed_precision_lora", "compute_fp32_loss",
            "enable_mixed_precision_compute",
        )
    },
    **{
        f"{role}_{name}": _LORA
        for role in ("actor", "critic")
        for name in ("lora_dim", "lora_module_name", "lora_learning_rate")
    },
    "only_optimize_lora": _LORA,
    **{
        name: _DROPOUT
        for name in (
            "actor_dropout", "critic_dropout", "disable_actor_dropout", "disable_critic_dropout",
        )
    },
}  # fmt: skip


def _derive(flags: Flags) -> Iterator[Setting]:
    """Batch, mini-batch, ZeRO stage, data, and the end of a test."""
    generated = flags.get("per_device_generation_batch_size")
    name = "generation_batch_numbers"
    name = name if name in flags else "generation_batches"
    batches, micro = flags.get(name), flags.get("per_device_training_batch_size")
    if "per_device_mini_train_batch_size" in flags:
        micro = flags.get("per_device_mini_train_batch_size")
    steps = flags.get("gradient_accumulation_steps")
    prompts = generated * batches * flags.ranks
    origin = f"{generated} a device x {batches} generations x {flags.ranks} ranks"
    yield Setting("data.train_batch_size", prompts, origin)
    origin = f"{micro} a device x {steps} accumulated x {flags.ranks} ranks"
    yield Setting("actor.ppo_mini_batch_size", min(prompts, micro * steps * flags.ranks), origin)
    for key in both("ppo_micro_batch_size_per_gpu"):
        yield Setting(key, micro, "--per_device_training_batch_size")
    yield Setting("rollout.batch_size", generated, "--per_device_generation_batch_size")
    for role in ("actor", "critic"):
        stage = flags.get(f"{role}_zero_stage")
        if stage is not None:
            origin = f"--{role}_zero_stage {stage}; weights are divided by TP and PP instead"
            yield Setting(f"{role}.megatron.use_distributed_optimizer", stage != 0, origin)
    if flags.get("data_path"):
        yield from data_set_files("data.train_files", flags.get("data_path"), "--data_path")
    if flags.get("unsupervised_dataset_name"):
        name, config = "unsupervised_dataset_name", "unsupervised_dataset_config_name"
        origin = given(flags, name, config)
        yield from data_set_files("data.ptx_files", flags.get(name), origin, flags.get(config))
    if "enable_test_mode" in flags and flags.get("test_stop_step"):
        yield Setting(
            "trainer.total_training_steps", flags.get("test_stop_step"), "--test_stop_step"
        )


SYSTEM = System(
    title="DeepSpeed-Chat",
    preset="deepspeed_chat",
    programs=(r"(.*/)?main\.py",),
    rows=ROWS,
    derive=_derive,
    reward_model="critic_model_name_or_path",
    extra=(Setting("data.apply_chat_template", False, "DeepSpeed-Chat's prompts are plain text"),),
)

"""TRL's PPO scripts: ``ppo.py`` and ``ppo_tldr.py``, with the flags of PPOv2 and of PPOTrainer.

Source: TRL 0.9 to 1.12: ``PPOv2Config``, ``PPOConfig``, ``ScriptArguments``, ``ModelConfig``, and
``TrainingArguments`` of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator

from mppo.recipe.data_set_name import is_data_set
from mppo_migrate.row import Flags, Operand, Setting, System, Without, to, when
from mppo_migrate.values import both, data_set_files, decay, given, trackers

_LORA = Without("LoRA is not supported: all weights are trained")
_OTHERS = r"(bco|cpo|dpo|gkd|grpo|gspo|kto|nash_md|online_dpo|orpo|prm|reward|rloo|sft|xpo)"
"""TRL's trainers without PPO, as its command and its scripts name them."""
_DEFAULT_MODEL = "EleutherAI/pythia-160m"
"""PPOConfig's policy, and its reward model, to which transformers adds a head of random weights."""
_PLAIN_DATA = "hf:trl-internal-testing/descriptiveness-sentiment-trl-style:descriptiveness"
"""What ppo.py reads unless the command says it; its prompts are plain text."""
_HUB = Without("nothing is uploaded; trainer.export_hf writes a Hugging Face folder")


ROWS = {
    "model_name_or_path": Operand(),
    "sft_model_path": Operand(_DEFAULT_MODEL),
    "reward_model_path": Operand(_DEFAULT_MODEL),
    "value_model": to("critic.path"),
    "per_device_train_batch_size": Operand(8),
    "gradient_accumulation_steps": Operand(1),
    "num_mini_batches": Operand(1),
    "total_episodes": to("total_episodes"),
    "num_sample_generations": to("num_sample_generations"),
    "num_train_epochs": to("trainer.total_epochs"),
    "num_ppo_epochs": to(*both("ppo_epochs")),
    "learning_rate": to(*both("optim.lr")),
    "lr_scheduler_type": to(*both("optim.lr_decay_style"), convert=decay),
    "warmup_ratio": to(*both("optim.lr_warmup_steps_ratio")),
    "warmup_steps": to(*both("optim.lr_warmup_steps")),
    "weight_decay": to(*both("optim.weight_decay")),
    "adam_epsilon": to(*both("optim.eps")),
    "adam_beta1": Operand(0.9),
    "adam_beta2": Operand(0.999),
    "max_grad_norm": Without("TRL's PPO does not clip gradients, nor does the preset"),
    "local_rollout_forward_batch_size": to(
        "rollout.batch_size", "actor.log_prob_micro_batch_size_per_gpu"
    ),
    "response_length": to("data.max_response_length"),
    "max_prompt_token_len": to("data.max_prompt_length"),
    "temperature": to("rollout.temperature"),
    "stop_token": Without("the model's eos token always ends a response"),
    "stop_token_id": to("rollout.stop_token_ids", convert=lambda value: [value]),
    "non_eos_penalty": Operand(False),
    "penalty_reward_value": Operand(-1.0),
    "missing_eos_penalty": to("reward.missing_eos_penalty"),
    "whiten_rewards": to("algorithm.whiten_rewards"),
    "kl_coef": to("algorithm.kl_ctrl.kl_coef"),
    "kl_estimator": to("algorithm.kl_penalty"),
    "cliprange": to("actor.clip_ratio"),
    "cliprange_value": to("critic.cliprange_value"),
    "vf_coef": to("critic.value_loss_coef"),
    "gamma": to("algorithm.gamma"),
    "lam": to("algorithm.lam"),
    "output_dir": to("trainer.default_local_dir"),
    "overwrite_output_dir": when("trainer.on_existing_run", true="set_aside", false="refuse"),
    "resume_from_checkpoint": Without("a run continues from its newest checkpoint by itself"),
    "run_name": to("trainer.experiment_name"),
    "exp_name": to("trainer.experiment_name"),
    "seed": to("trainer.seed"),
    "report_to": to("trainer.logger", convert=trackers),
    "save_steps": to("trainer.save_freq"),
    "save_total_limit": to("trainer.max_ckpt_to_keep"),
    "save_strategy": Without("trainer.save_freq: -1 saves no checkpoint"),
    "eval_steps": to("trainer.test_freq"),
    "eval_strategy": Without("trainer.test_freq: -1 never validates"),
    "per_device_eval_batch_size": Without("data.val_batch_size counts over all ranks"),
    "bf16": when("model.dtype", true="bfloat16", false="float32"),
    "fp16": Without("float16 is not supported; model.dtype is bfloat16 or float32"),
    "torch_dtype": to("model.dtype", convert=lambda v: "bfloat16" if v == "auto" else v),
    "dtype": to("model.dtype", convert=lambda v: "bfloat16" if v == "auto" else v),
    "trust_remote_code": to("model.trust_remote_code"),
    "gradient_checkpointing": when(
        *both("megatron.recompute_granularity"), true="full", false="none"
    ),
    "dataset_name": Operand(),
    "dataset_config": Operand(),
    "dataset_train_split": Operand(),
    "dataset_test_split": Operand(),
    "dataset_num_proc": Without("prompts are read once, when the run starts"),
    "logging_steps": Without("metrics are written in every step"),
    "attn_implementation": Without("Megatron-Core's attention is used"),
    "deepspeed": Without("<role>.megatron.* is the layout; there is no DeepSpeed"),
    "ds3_gather_for_generation": Without("the rollout engine has its own copy of the weights"),
    "model_revision": Without("model.path is a local folder, or the main revision on the hub"),
    "push_to_hub": _HUB,
    "hub_model_id": _HUB,
    **{
        name: _LORA
        for name in (
            "use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules",
            "lora_task_type", "load_in_4bit", "load_in_8bit", "model_adapter_name",
            "ref_adapter_name",
        )
    },
}  # fmt: skip


def _derive(flags: Flags) -> Iterator[Setting]:
    """Models, batch, penalty and data."""
    policy, reward = flags.get("sft_model_path"), flags.get("reward_model_path")
    yield Setting("model.path", policy, _origin(flags, "sft_model_path"))
    if (model := flags.get("model_name_or_path")) and model != policy:
        yield Setting("model.tokenizer_path", model, "--model_name_or_path")
    origin = _origin(flags, "reward_model_path")
    head = "" if "reward_model_path" in flags else ", with a head of random weights"
    yield Setting("reward_model.path", reward, f"{origin}{head}")
    if "value_model" not in flags:
        yield Setting("critic.path", reward, f"{origin}: TRL's critic starts from it")
    micro, steps = (
        flags.get("per_device_train_batch_size"),
        flags.get("gradient_accumulation_steps"),
    )
    parts = flags.get("num_mini_batches")
    terms = f"{micro} a device x {steps} accumulated x {parts} mini-batches x {flags.ranks} ranks"
    yield Setting("data.train_batch_size", micro * steps * parts * flags.ranks, terms)
    yield Setting("num_mini_batches", parts, "--num_mini_batches")
    for role in ("actor", "critic"):
        key = f"{role}.ppo_micro_batch_size_per_gpu"
        yield Setting(key, micro, "--per_device_train_batch_size")
    if "adam_beta1" in flags or "adam_beta2" in flags:
        betas = [flags.get("adam_beta1"), flags.get("adam_beta2")]
        for key in both("optim.betas"):
            yield Setting(key, betas, "--adam_beta1, --adam_beta2")
    if "non_eos_penalty" in flags:
        value = flags.get("penalty_reward_value")
        yield Setting("reward.missing_eos_score", value, "--non_eos_penalty")
    if flags.get("dataset_name"):
        yield from _data_sets(flags)
    elif not _is_tldr(flags):
        yield Setting("data.train_files", [_PLAIN_DATA], "ppo.py's own")
    if not _is_tldr(flags):
        yield Setting("data.apply_chat_template", False, "ppo.py's prompts are plain text")


def _is_tldr(flags: Flags) -> bool:
    return "tldr" in flags.program


def _origin(flags: Flags, name: str) -> str:
    return f"--{name}" if name in flags else f"PPOConfig's default of --{name}"


def _data_sets(flags: Flags) -> Iterator[Setting]:
    """The training split of a data set, and its test split if it is one of the Hub."""
    name, config = flags.get("dataset_name"), flags.get("dataset_config")
    split, test = flags.get("dataset_train_split"), flags.get("dataset_test_split")
    origin = given(flags, "dataset_name", "dataset_config", "dataset_train_split")
    yield from data_set_files("data.train_files", name, origin, config, split)
    if test:
        origin = given(flags, "dataset_name", "dataset_test_split")
        for setting in data_set_files("data.val_files", name, origin, config, test):
            if all(map(is_data_set, setting.value)):
                yield setting


SYSTEM = System(
    title="TRL",
    preset="trl",
    programs=(r"(.*/)?ppo(v2)?(_tldr)?\.py", r"(.*/)?ppo_\w+\.py", r"trl\..*ppo\w*"),
    rows=ROWS,
    derive=_derive,
    reward_model="reward_model_path",
    others=rf"trl {_OTHERS}|(.*/)?{_OTHERS}(_\w+)?\.py|trl\.scripts\.{_OTHERS}",
)

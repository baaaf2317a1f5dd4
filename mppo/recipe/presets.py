"""``algorithm.preset``: the defaults of other systems, and the settings of papers.

A preset has keys and that system's or paper's values, by their source. Keys that the user set keep
their value; keys that are not listed keep mppo's default.

Sources: verl 0.7 ``_generated_ppo_megatron_trainer.yaml``; TRL 1.12 ``PPOConfig`` and its train
loop; DeepSpeed-Chat ``step3_rlhf_finetuning/main.py``, ``ppo_trainer.py``, ``rlhf_engine.py``;
OpenRLHF 0.3 ``train_ppo.py``, ``models/loss.py`` and ``experience_maker.py``; the papers that the
rows name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CopyOf:
    """The value of another key, times a factor for numbers; if it has none, the row does not
    apply."""

    key: str
    factor: float = 1.0


@dataclass(frozen=True)
class IfSet:
    """A value that applies only if another key is set."""

    key: str
    value: Any


Preset = Mapping[str, Mapping[str, Any]]
"""By source, the keys that it sets and their values."""


def _both(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of keys that actor and critic share, for both."""
    return {f"{role}.{key}": value for key, value in values.items() for role in ("actor", "critic")}


VERL: Preset = {
    "ppo_megatron_trainer.yaml: data, trainer, rollout": {
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "data.filter_overlong_prompts": False,
        "data.truncation": "error",
        "trainer.total_epochs": 30,
        "trainer.critic_warmup": 0,
        "rollout.temperature": 1.0,
        "rollout.top_p": 1.0,
        "rollout.top_k": -1,
        "rollout.val_kwargs.temperature": 0.0,
    },
    "ppo_megatron_trainer.yaml: algorithm, actor, critic": {
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": 1.0,
        "algorithm.lam": 1.0,
        "algorithm.norm_adv_by_std_in_grpo": True,
        "algorithm.use_kl_in_reward": False,
        "algorithm.kl_penalty": "kl",
        "algorithm.kl_ctrl.type": "fixed",
        "algorithm.kl_ctrl.kl_coef": 0.001,
        "algorithm.kl_ctrl.horizon": 10000,
        "algorithm.kl_ctrl.target_kl": 0.1,
        "actor.ppo_mini_batch_size": 256,
        "actor.ppo_epochs": 1,
        "actor.shuffle": False,
        "actor.clip_ratio": 0.2,
        "actor.clip_ratio_c": 3.0,
        "actor.loss_agg_mode": "token-mean",
        "actor.entropy_coeff": 0.0,
        "actor.use_kl_loss": False,
        "actor.kl_loss_coef": 0.001,
        "actor.kl_loss_type": "low_var_kl",
        "actor.optim.lr": 1e-6,
        "critic.use_dynamic_bsz": CopyOf("actor.use_dynamic_bsz"),
        "critic.shuffle": CopyOf("actor.shuffle"),
        "critic.loss_agg_mode": CopyOf("actor.loss_agg_mode"),
        "critic.ppo_epochs": CopyOf("actor.ppo_epochs"),
        "critic.cliprange_value": 0.5,
        "critic.optim.lr": 1e-5,
        **_both({"optim.weight_decay": 0.01, "optim.clip_grad": 1.0, "optim.betas": (0.9, 0.999)}),
    },
}

TRL: Preset = {
    "PPOConfig": {
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": 1.0,
        "algorithm.lam": 0.95,
        "algorithm.whiten_rewards": False,
        "algorithm.kl_penalty": "k1",
        "algorithm.kl_ctrl.type": "fixed",
        "algorithm.kl_ctrl.kl_coef": 0.05,
        "actor.ppo_epochs": 4,
        "actor.clip_ratio": 0.2,
        "actor.optim.lr": 3e-6,
        "critic.ppo_epochs": CopyOf("actor.ppo_epochs"),
        "critic.cliprange_value": 0.2,
        "critic.value_loss_coef": 0.1,
        "critic.optim.lr": CopyOf("actor.optim.lr"),
        "data.max_response_length": 53,
        "rollout.temperature": 0.7,
        "actor.ppo_mini_batch_size": CopyOf("data.train_batch_size"),
    },
    "PPOTrainer.train": {
        "algorithm.use_kl_in_reward": True,
        "algorithm.whiten_advantages": True,
        "algorithm.score_after_end": True,
        "actor.clip_ratio_c": None,
        "actor.entropy_coeff": 0.0,
        "actor.use_kl_loss": False,
        **_both({"shuffle": True, "loss_agg_mode": "token-mean", "optim.clip_grad": 0.0}),
    },
    "transformers.TrainingArguments": {
        "trainer.total_epochs": 3,
        "trainer.seed": 42,
        **_both(
            {
                "optim.weight_decay": 0.0,
                "optim.betas": (0.9, 0.999),
                "optim.lr_decay_style": "linear",
            }
        ),
    },
}

DEEPSPEED_CHAT: Preset = {
    "ppo_trainer.py: DeepSpeedPPOTrainer": {
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": 1.0,
        "algorithm.lam": 0.95,
        "algorithm.whiten_advantages": False,
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": "k1",
        "algorithm.kl_ctrl.type": "fixed",
        "algorithm.kl_ctrl.kl_coef": 0.1,
        "reward.clip": 5.0,
        "actor.clip_ratio": 0.2,
        "actor.clip_ratio_c": None,
        "actor.loss_agg_mode": "token-mean",
        "actor.entropy_coeff": 0.0,
        "actor.use_kl_loss": False,
        "critic.cliprange_value": 0.2,
        "critic.loss_agg_mode": "token-mean",
    },
    "main.py: parse_args; ds_utils.py; rlhf_engine.py": {
        "actor.ppo_epochs": 1,
        "critic.ppo_epochs": CopyOf("actor.ppo_epochs"),
        "actor.ppo_mini_batch_size": CopyOf("data.train_batch_size"),
        "data.max_prompt_length": 256,
        "data.max_response_length": 256,
        "actor.ptx_coef": IfSet("data.ptx_files", 27.8),
        "trainer.total_epochs": 1,
        "actor.optim.lr": 9.65e-6,
        "critic.optim.lr": 5e-6,
        **_both(
            {
                "optim.weight_decay": 0.0,
                "optim.betas": (0.9, 0.95),
                "optim.clip_grad": 1.0,
                "optim.lr_decay_style": "cosine",
                "optim.lr_warmup_steps": 100,
            }
        ),
    },
}

OPENRLHF: Preset = {
    "train_ppo.py: parse_args": {
        "algorithm.gamma": 1.0,
        "algorithm.lam": 0.95,
        "algorithm.kl_ctrl.type": "fixed",
        "algorithm.kl_ctrl.kl_coef": 0.02,
        "actor.clip_ratio": 0.2,
        "actor.ppo_epochs": 1,
        "critic.ppo_epochs": CopyOf("actor.ppo_epochs"),
        "critic.cliprange_value": 0.2,
        "data.train_batch_size": 512,
        "actor.ppo_mini_batch_size": 128,
        "data.max_prompt_length": 1024,
        "data.max_response_length": 1024,
        "rollout.temperature": 1.0,
        "rollout.top_p": 1.0,
        "actor.ptx_coef": IfSet("data.ptx_files", 0.05),
        "trainer.total_epochs": 1,
        "trainer.seed": 42,
        "actor.optim.lr": 1e-6,
        "critic.optim.lr": 9e-6,
        **_both({"optim.weight_decay": 0.0, "optim.betas": (0.9, 0.95), "optim.clip_grad": 1.0}),
    },
    "train_ppo.py, models/loss.py, models/utils.py, experience_maker.py": {
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": "k1",
        "algorithm.whiten_advantages": True,
        "algorithm.whiten_unbiased": False,
        "reward.clip": 10.0,
        "actor.clip_ratio_c": None,
        "actor.entropy_coeff": 0.0,
        "actor.use_kl_loss": False,
        "actor.optim.min_lr": CopyOf("actor.optim.lr", 0.1),
        "critic.optim.min_lr": CopyOf("critic.optim.lr", 0.1),
        **_both(
            {
                "loss_agg_mode": "seq-mean-token-mean",
                "shuffle": True,
                "optim.lr_decay_style": "cosine",
                "optim.lr_warmup_steps_ratio": 0.03,
            }
        ),
    },
}

SAO: Preset = {
    "arXiv:2607.07508, reasoning: DIS, length-adaptive lambda, critic": {
        "algorithm.adv_estimator": "gae",
        "algorithm.lam_length_adaptive_alpha": 1.5,
        "algorithm.lam_value": 1.0,
        "algorithm.rollout_correction.bypass_mode": True,
        "actor.policy_loss.loss_mode": "dis",
        "actor.clip_ratio_low": 0.3,
        "actor.clip_ratio_high": 5.0,
        "actor.optim.lr": 1e-6,
        "critic.optim.lr": 5e-6,
        "critic.ppo_epochs": 2,
        "critic.freeze": ("self_attn",),
        "trainer.critic_warmup": 10,
        "rollout.n": 1,
        "data.train_batch_size": 128,
        "actor.ppo_mini_batch_size": CopyOf("data.train_batch_size"),
    }
}

VAPO: Preset = {
    "arXiv:2504.05118": {
        "algorithm.adv_estimator": "gae",
        "algorithm.lam_length_adaptive_alpha": 0.05,
        "algorithm.lam_value": 1.0,
        "actor.clip_ratio_low": 0.2,
        "actor.clip_ratio_high": 0.28,
        "actor.loss_agg_mode": "token-mean",
        "actor.positive_nll_coef": 0.1,
        "actor.optim.lr": 1e-6,
        "critic.optim.lr": 2e-6,
        "trainer.critic_warmup": 50,
        "rollout.n": 16,
        "data.train_batch_size": 512,
    }
}

VC_PPO: Preset = {
    "arXiv:2503.01491: decoupled GAE": {
        "algorithm.adv_estimator": "gae",
        "algorithm.lam": 0.95,
        "algorithm.lam_value": 1.0,
    },
    "arXiv:2504.05118: steps of value pretraining, whose end the paper leaves open": {
        "trainer.critic_warmup": 50
    },
}

TURN_PPO: Preset = {
    "arXiv:2512.17008": {
        "algorithm.adv_estimator": "gae",
        "algorithm.gae_unit": "turn",
        "algorithm.gamma": 0.99,
        "algorithm.lam": 0.9,
    }
}

COMPACTION_RL: Preset = {
    "arXiv:2607.05378: GAE per segment, credit across segments, token mean": {
        "algorithm.adv_estimator": "gae",
        "algorithm.lam_length_adaptive_alpha": 1.5,
        "algorithm.segment_credit": True,
        "actor.loss_agg_mode": "token-mean",
        "actor.optim.lr": 2e-6,
        "critic.optim.lr": 3e-6,
        "critic.ppo_epochs": 2,
        "trainer.critic_warmup": 50,
        "rollout.n": 1,
        "data.train_batch_size": 128,
        "actor.ppo_mini_batch_size": CopyOf("data.train_batch_size"),
    }
}

SYSTEMS: dict[str, Preset] = {
    "verl": VERL,
    "trl": TRL,
    "deepspeed_chat": DEEPSPEED_CHAT,
    "openrlhf": OPENRLHF,
}
PAPERS: dict[str, Preset] = {
    "sao": SAO,
    "vapo": VAPO,
    "vc_ppo": VC_PPO,
    "turn_ppo": TURN_PPO,
    "compaction_rl": COMPACTION_RL,
}
PRESETS: dict[str, Preset] = SYSTEMS | PAPERS
"""By value of ``algorithm.preset``."""


def apply_preset(document: Mapping[str, Any]) -> dict[str, Any]:
    """A new document with a preset's defaults for keys that the user did not set. Overrides are
    merged into ``document``, which is not validated yet: an unknown preset adds nothing."""
    filled = _copy(document)
    section = filled.get("algorithm")
    name = section.get("preset") if isinstance(section, Mapping) else None
    preset = PRESETS.get(name, {}) if isinstance(name, str) else {}
    rows = [row for values in preset.values() for row in values.items()]
    # rows that read other keys come last, when those keys have their values
    for key, value in sorted(rows, key=lambda row: isinstance(row[1], CopyOf | IfSet)):
        if isinstance(value, CopyOf | IfSet):
            value = _resolve(filled, value)
            if value is None:
                continue
        _fill(filled, key.split("."), value)
    return filled


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    return value


def _resolve(document: Mapping[str, Any], row: CopyOf | IfSet) -> Any:
    """The row's value; None if its key has no value, or none that can be multiplied."""
    value: Any = document
    for part in row.key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(row, IfSet):
        return row.value if value else None
    if row.factor == 1.0:
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value * row.factor if number else None


def _fill(document: dict[str, Any], parts: list[str], value: Any) -> None:
    """Set a key that is absent; a value that the user wrote stays, even null or an invalid one."""
    for part in parts[:-1]:
        inner = document.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        document = inner
    document.setdefault(parts[-1], value)

"""The recipe's ``algorithm`` section: from scores to advantages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mppo.config.section import Section

KLType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+", "full+",
]  # fmt: skip


WHITENED_BY_DEFAULT = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators whose advantages verl whitens over the batch."""


class KLControlConfig(Section):
    """Coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = Field(default=0.001, ge=0)
    horizon: int = Field(default=10000, gt=0)
    target_kl: float = Field(default=0.1, gt=0)


class PFPPOConfig(Section):
    """PF-PPO: resample the batch by reward before the update."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    weight_pow: float = Field(default=2.0, gt=0)


class RolloutCorrectionConfig(Section):
    """Correction for the gap between the engine's and the actor's probabilities."""

    rollout_is: Literal["off", "token", "sequence"] = "off"
    rollout_is_threshold: float = Field(default=2.0, gt=0)
    rollout_is_lower: float | None = Field(default=None, gt=0)
    rollout_is_mode: Literal["truncate", "mask"] = "truncate"
    rollout_is_batch_normalize: bool = False
    rollout_rs: Literal[
        "off",
        "token_k1", "token_k2", "token_k3",
        "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
        "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
        "seq_max_k1", "seq_max_k2", "seq_max_k3",
        "geometric",
    ] = "off"  # fmt: skip
    rollout_rs_threshold: float = Field(default=2.0, gt=0)
    rollout_rs_threshold_lower: float | None = None
    rollout_token_veto_threshold: float | None = Field(default=None, gt=0)
    bypass_mode: bool = False


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): generate until a batch of groups differ in score within themselves.

    After ``max_num_gen_batches`` generations, groups of equal scores fill what is missing.
    """

    enable: bool = False
    max_num_gen_batches: int = Field(default=10, gt=0)


class ScoreNormalizationConfig(Section):
    """Scores brought to a common scale before they become rewards.

    ``given`` uses ``mean`` and ``std``; ``running`` the scores seen so far in the run.
    """

    mode: Literal["off", "given", "batch", "group", "running"] = "off"
    mean: float = 0.0
    std: float = Field(default=1.0, gt=0)


class AlgorithmConfig(Section):
    """Rewards to advantages.

    ``whiten_advantages: null`` whitens for gae, reinforce_plus_plus and its baseline form, as verl
    does, over the whole batch, or with ``whiten_over: group`` over each prompt's responses;
    ``whiten_unbiased: false`` divides by n instead of n - 1 (OpenRLHF). ``f_norm`` divides
    GPG's advantages. ``mask_truncated`` trains on no token of a response that ended for length.
    ``score_after_end`` puts the score of a response that stopped behind its stop token, a state of
    which the critic learns the value too (TRL).
    """

    preset: Literal["verl", "trl", "deepspeed_chat", "openrlhf"] | None = None
    adv_estimator: Literal[
        "gae", "grpo", "dr_grpo", "rloo", "rloo_vectorized", "reinforce_plus_plus",
        "reinforce_plus_plus_baseline", "remax", "opo", "gpg",
    ] = "gae"  # fmt: skip
    gamma: float = Field(default=1.0, ge=0, le=1)
    lam: float = Field(default=1.0, ge=0, le=1)
    lam_value: float | None = Field(default=None, ge=0, le=1)
    lam_length_adaptive_alpha: float | None = Field(default=None, gt=0)
    norm_adv_by_std_in_grpo: bool = True
    f_norm: float = Field(default=1.0, gt=0)
    whiten_advantages: bool | None = None
    whiten_over: Literal["batch", "group"] = "batch"
    whiten_unbiased: bool = True
    whiten_rewards: bool = False
    use_kl_in_reward: bool = False
    kl_penalty: KLType = "kl"
    kl_ctrl: KLControlConfig = KLControlConfig()
    use_pf_ppo: bool = False
    pf_ppo: PFPPOConfig = PFPPOConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    mask_truncated: bool = False
    score_after_end: bool = False
    normalize_scores: ScoreNormalizationConfig = ScoreNormalizationConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened: as asked, or as verl does for the estimator."""
        if self.whiten_advantages is not None:
            return self.whiten_advantages
        return self.adv_estimator in WHITENED_BY_DEFAULT

    @property
    def uses_critic(self) -> bool:
        """Whether a value model is trained: only gae reads values."""
        return self.adv_estimator == "gae"

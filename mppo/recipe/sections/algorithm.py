"""The recipe's ``algorithm`` section: from scores to advantages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mppo.recipe.sections.registered import check_of, schema_of
from mppo.recipe.sections.section import Section
from mppo.register import estimator

KLType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+", "full+",
]  # fmt: skip


Rejection = Literal[
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k1", "seq_max_k2", "seq_max_k3",
    "geometric",
]  # fmt: skip


Positive = Annotated[float, Field(gt=0)]


def _several(value: Any) -> Any:
    """A list for one value and for texts divided by commas; an empty one for off and null."""
    parts: list[Any] = []
    for each in value if isinstance(value, list | tuple) else [value]:
        parts += [text.strip() for text in each.split(",")] if isinstance(each, str) else [each]
    return [] if parts in ([None], ["off"]) else parts


WHITENED_BY_DEFAULT = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
"""Estimators whose advantages verl whitens over the batch."""


TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
"""Estimators with a baseline for each position of a prompt's responses."""


class KLControlConfig(Section):
    """Coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Keep the coefficient, or steer the KL towards ``target_kl`` (arXiv:1909.08593)."""
    kl_coef: float = Field(default=0.001, ge=0)
    """The coefficient; the first one if it is adaptive."""
    horizon: int = Field(default=10000, gt=0)
    """Sequences over which the adaptive coefficient moves."""
    target_kl: float = Field(default=0.1, gt=0)
    """KL per token, nats, that the adaptive coefficient aims at."""


class PFPPOConfig(Section):
    """PF-PPO: resample the batch by reward before the update (arXiv:2409.06957)."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """Weight of a response: ``|score|^weight_pow``; 1 for the largest and smallest score; or 0.4
    for the largest score and 0.1 for all others."""
    weight_pow: float = Field(default=2.0, gt=0)
    """Exponent of ``pow``."""


class RolloutCorrectionConfig(Section):
    """Correction for the difference between the rollout engine's and the actor's probabilities."""

    rollout_is: Literal["off", "token", "sequence"] = "off"
    """Importance weights on the policy loss: the ratio actor / engine of each token, or of the
    sequence."""
    rollout_is_threshold: float = Field(default=2.0, gt=0)
    """Upper bound of the importance weights."""
    rollout_is_lower: float | None = Field(default=None, gt=0)
    """Lower bound of the importance weights. null: none with ``truncate``, otherwise 1 /
    threshold."""
    rollout_is_mode: Literal["truncate", "mask", "indicator"] = "truncate"
    """For weights outside the bounds: clip them, or set them to 0 (IcePop). ``indicator``: 1 inside
    the bounds and 0 outside (MIS-PO)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rollout_rs: Annotated[
        tuple[Rejection, ...],
        BeforeValidator(
            _several, json_schema_input_type=Rejection | Literal["off"] | list[Rejection]
        ),
    ] = ()
    """Rejection of tokens (``token_*``) or sequences by an estimator of the KL between engine and
    actor; ``geometric`` is seq_mean_k1. Of several, in a list, a token must pass all. Empty, or
    ``off``: none."""
    rollout_rs_threshold: Annotated[
        tuple[Positive, ...],
        Field(min_length=1),
        BeforeValidator(_several, json_schema_input_type=Positive | list[Positive]),
    ] = (2.0,)
    """Upper bound of what is kept: a ratio for k1, a KL in nats for k2 and k3. One number, or one
    for each of ``rollout_rs``."""
    rollout_rs_threshold_lower: Annotated[
        tuple[Positive | None, ...],
        BeforeValidator(_several, json_schema_input_type=Positive | list[Positive | None]),
    ] = ()
    """Lower bound of the ratio, for k1. One number, or one for each of ``rollout_rs``. null: 1 /
    ``rollout_rs_threshold``."""
    rollout_token_veto_threshold: float | None = Field(default=None, gt=0)
    """A sequence with a token whose ratio is below this is rejected. null: no veto."""
    bypass_mode: bool = False
    """Use the engine's log-probabilities as the old ones, and leave out the actor's forward
    pass."""

    def rejections(self) -> Iterator[tuple[Rejection, float, float | None]]:
        """Kind, upper and lower bound of each rejection; a single bound holds for all."""
        count = len(self.rollout_rs)
        uppers = self.rollout_rs_threshold * (1 if len(self.rollout_rs_threshold) > 1 else count)
        lowers = self.rollout_rs_threshold_lower or (None,)
        lowers = lowers if len(lowers) > 1 else lowers * count
        yield from zip(self.rollout_rs, uppers, lowers, strict=True)


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO): generate until the batch is full of groups with unequal scores."""

    enable: bool = False
    """Turn dynamic sampling on."""
    max_num_gen_batches: int = Field(default=10, gt=0)
    """Most generations of ``data.train_batch_size`` prompts per step; after them, groups of equal
    scores fill the batch."""


class ScoreNormalizationConfig(Section):
    """Normalisation of scores before they become rewards."""

    mode: Literal["off", "given", "batch", "group", "running"] = "off"
    """Mean and standard deviation: of this section (given), of the batch, of each prompt's
    responses (group), or of all scores of the run so far (running)."""
    mean: float = 0.0
    """The mean, with ``mode: given``."""
    std: float = Field(default=1.0, gt=0)
    """The standard deviation, with ``mode: given``."""


class AlgorithmConfig(Section):
    """Rewards, advantages and corrections. docs/algorithms.md has the formulas."""

    preset: Literal[
        "verl", "trl", "deepspeed_chat", "openrlhf", "sao", "vapo", "vc_ppo", "turn_ppo",
        "compaction_rl",
    ] | None = None  # fmt: skip
    """Take another system's defaults, or a paper's settings, for keys that the recipe does not set.
    null: mppo's own defaults."""
    adv_estimator: Annotated[str, check_of(estimator), schema_of(estimator)] = "gae"
    """The advantage estimator, or the name of a plugin's (``trainer.plugins``). Only ``gae`` trains
    a critic."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token, or per turn (``gae_unit``)."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of GAE."""
    lam_value: float | None = Field(default=None, ge=0, le=1)
    """Lambda of the critic's returns (VAPO). null: the policy's."""
    lam_length_adaptive_alpha: float | None = Field(default=None, gt=0)
    """Lambda by response length, 1 - 1 / (alpha length) (VAPO). null: ``lam``."""
    gae_unit: Literal["token", "turn"] = "token"
    """Steps of GAE: tokens, or turns of a conversation. With turns the critic learns one value per
    turn, at its first token, and all tokens of a turn have its advantage (Turn-PPO)."""
    segment_credit: bool = False
    """Of an episode of several sequences (segments of a conversation that was compacted), multiply
    the advantages of each by (gamma lambda)^N, with N tokens generated after it (CompactionRL)."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide the advantages of grpo, grpo_passk and gdpo by their group's standard deviation."""
    gdpo_reward_keys: tuple[str, ...] = ()
    """Names of the numbers of the reward function's result that gdpo normalises, each by itself."""
    gdpo_reward_weights: tuple[float, ...] = ()
    """Weight of each of ``gdpo_reward_keys``. Empty: 1."""
    f_norm: float = Field(default=1.0, gt=0)
    """Divisor of GPG's advantages."""
    whiten_advantages: bool | None = None
    """Whiten the advantages. null: as in verl, for gae, reinforce_plus_plus,
    reinforce_plus_plus_baseline and gdpo."""
    whiten_over: Literal["batch", "group"] = "batch"
    """Whiten over the batch, or over the responses of each prompt."""
    whiten_unbiased: bool = True
    """Divide the variance by n - 1. false: by n (OpenRLHF)."""
    whiten_rewards: bool = False
    """Divide rewards by their standard deviation and keep the mean (TRL)."""
    use_kl_in_reward: bool = False
    """Subtract a KL penalty to the reference from each token's reward."""
    kl_penalty: KLType = "kl"
    """Estimator of the KL penalty in the reward; ``full`` sums over the vocabulary."""
    kl_ctrl: KLControlConfig = KLControlConfig()
    """Coefficient of the KL penalty."""
    use_pf_ppo: bool = False
    """Resample the batch by reward before the update (PF-PPO)."""
    pf_ppo: PFPPOConfig = PFPPOConfig()
    """Options of PF-PPO."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    """Dynamic sampling (DAPO)."""
    mask_truncated: bool = False
    """Do not train on responses that reached ``data.max_response_length`` (overlong filtering)."""
    bootstrap_truncated: bool = False
    """Replace the score of a response that was cut off by its length by the critic's value of the
    state after its last token (Step 3.5 Flash)."""
    score_after_end: bool = False
    """Put the score of a response that stopped one position after its stop token, a state whose
    value the critic learns too (TRL). false: on the last response token."""
    normalize_scores: ScoreNormalizationConfig = ScoreNormalizationConfig()
    """Normalisation of scores."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Correction for the difference between rollout engine and actor."""

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened: ``whiten_advantages``, or verl's choice."""
        if self.whiten_advantages is not None:
            return self.whiten_advantages
        return self.adv_estimator in WHITENED_BY_DEFAULT

    @property
    def has_token_baseline(self) -> bool:
        """Whether the baseline needs the actor's squared probabilities over the vocabulary."""
        return self.adv_estimator in TOKEN_BASELINES

    @property
    def uses_critic(self) -> bool:
        """Whether the run trains a value model: only gae reads values."""
        return self.adv_estimator == "gae"

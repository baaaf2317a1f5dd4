"""The recipe's ``actor``, ``critic`` and ``ref`` sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from mppo.recipe.sections.algorithm import KLType
from mppo.recipe.sections.megatron import MegatronConfig
from mppo.recipe.sections.optim import OptimConfig
from mppo.recipe.sections.registered import check_of, schema_of
from mppo.recipe.sections.section import Section
from mppo.register import policy_loss

SEQUENCE_LOSSES = ("gspo", "gmpo", "sapo")
"""Policy losses defined with seq-mean-token-mean. They always use it, so ``actor.loss_agg_mode``
may keep its default."""

LossAggMode = Literal[
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "token-sum",
]


DEFAULT_TOKEN_BUDGET = 16384


class BatchingConfig(Section):
    """How a role's sequences are cut into micro-batches: affects speed and memory, not results."""

    ppo_micro_batch_size_per_gpu: int = Field(default=8, gt=0)
    """Most sequences of a data-parallel rank's micro-batch in training."""
    use_dynamic_bsz: bool = False
    """Also limit micro-batches by tokens (``*_max_token_len_per_gpu``), so that short sequences
    share one."""
    ppo_max_token_len_per_gpu: PositiveInt | Literal["auto"] = DEFAULT_TOKEN_BUDGET
    """Most tokens per GPU of a training micro-batch, with ``use_dynamic_bsz``. auto (of actor or
    critic): as many as take the time of the other role's micro-batch, within its memory
    (docs/schedule.md)."""
    log_prob_micro_batch_size_per_gpu: int | None = Field(default=None, gt=0)
    """Most sequences of a micro-batch in forward-only passes. null:
    ``ppo_micro_batch_size_per_gpu``."""
    log_prob_max_token_len_per_gpu: int | None = Field(default=None, gt=0)
    """Most tokens per GPU of a micro-batch in forward-only passes, with ``use_dynamic_bsz``. null:
    ``ppo_max_token_len_per_gpu``."""
    head_chunk_tokens: int = Field(default=1024, gt=0)
    """Tokens whose logits are in memory at the same time."""

    @property
    def token_budget(self) -> int:
        """``ppo_max_token_len_per_gpu`` of a recipe from ``with_token_budgets``: a number."""
        assert self.ppo_max_token_len_per_gpu != "auto", "the budget has not been computed yet"
        return self.ppo_max_token_len_per_gpu


ValueHeadInit = NonNegativeFloat | Literal["initializer_range", "inverse_hidden"]


class PolicyLossConfig(Section):
    """The policy loss and the options of single losses."""

    loss_mode: Annotated[str, check_of(policy_loss), schema_of(policy_loss)] = "vanilla"
    """The policy loss, or the name of a plugin's (``trainer.plugins``); ``vanilla`` is PPO's
    clipped loss. ``dis`` (SAO) and ``reinforce`` take the ratio to the engine: they need
    ``algorithm.rollout_correction.bypass_mode``. With ``dppo_tv`` and ``dppo_kl``,
    ``actor.clip_ratio*`` bound a divergence. docs/algorithms.md has the formulas."""
    tau_pos: float = Field(default=1.0, gt=0)
    """SAPO: temperature where the advantage is positive."""
    tau_neg: float = Field(default=1.05, gt=0)
    """SAPO: temperature where the advantage is not positive."""
    clip_cov_ratio: float = Field(default=0.0002, ge=0, le=1)
    """Clip-Cov: largest share of the mini-batch's tokens whose loss is set to 0."""
    clip_cov_lb: float = 1.0
    """Clip-Cov: lower bound of the covariance of these tokens."""
    clip_cov_ub: float = 5.0
    """Clip-Cov: upper bound of the covariance of these tokens."""
    kl_cov_ratio: float = Field(default=0.0002, ge=0, le=1)
    """KL-Cov: share of the mini-batch's tokens, those of largest covariance, with a KL penalty."""
    ppo_kl_coef: float = Field(default=0.1, ge=0)
    """KL-Cov: coefficient of that penalty."""
    dro_beta: float | None = Field(default=None, gt=0)
    """DRO: weight of the squared log-ratio; needed with ``dro``."""


class ActorConfig(BatchingConfig):
    """The policy: PPO update, optimizer and layout."""

    ppo_mini_batch_size: int = Field(default=64, gt=0)
    """Prompts per optimizer step, each with its ``rollout.n`` responses; divides
    ``data.train_batch_size``."""
    ppo_epochs: int = Field(default=1, gt=0)
    """Passes over each batch."""
    shuffle: bool = False
    """Shuffle the batch's sequences in every epoch before the cut into mini-batches."""
    clip_ratio: float = Field(default=0.2, ge=0)
    """PPO's clip range epsilon of the probability ratio."""
    clip_ratio_low: float | None = Field(default=None, ge=0)
    """Clip range below 1. null: ``clip_ratio``."""
    clip_ratio_high: float | None = Field(default=None, ge=0)
    """Clip range above 1 (clip-higher). null: ``clip_ratio``."""
    clip_ratio_c: float | None = Field(default=3.0, gt=1)
    """Dual clip: bound of the ratio for negative advantages. null: no dual clip."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become the loss of a mini-batch."""
    loss_scale_factor: float | None = Field(default=None, gt=0)
    """Divisor of seq-mean-token-sum-norm, in tokens. null: ``data.max_response_length``."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """The policy loss and its options."""
    entropy_coeff: float = 0.0
    """Coefficient of the entropy bonus; 0 turns it off."""
    use_kl_loss: bool = False
    """Add a KL term to the reference to the loss."""
    kl_loss_coef: float = Field(default=0.001, ge=0)
    """Coefficient of the KL loss."""
    kl_loss_type: KLType = "low_var_kl"
    """Estimator of the KL loss; ``full`` sums over the vocabulary, a trailing ``+`` takes the
    gradient of k2."""
    positive_nll_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the negative log-likelihood of responses whose score is above 0 (VAPO: 0.1);
    0 turns it off."""
    optim: OptimConfig = OptimConfig(lr=1e-6)
    """The actor's optimizer."""
    megatron: MegatronConfig = MegatronConfig()
    """The actor's layout and Megatron-Core options."""
    router_replay: Literal["off", "R2", "R3"] = "off"
    """Experts of a mixture that the update uses again: those of the pass that computed the old
    log-probabilities (R2), or those of the rollout engine, in that pass too (R3)."""
    ptx_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the language-model loss on ``data.ptx_files``; 0 turns it off."""
    ema_decay: float | None = Field(default=None, ge=0, lt=1)
    """Decay per optimizer step of a moving average of the weights, which is saved in checkpoints
    and exported beside the actor. null: no average."""

    @property
    def learns_full_kl(self) -> bool:
        """Whether the loss has a KL term over the whole vocabulary."""
        return self.use_kl_loss and self.kl_loss_type.startswith("full")


class HLGaussConfig(Section):
    """The histogram of values of the loss ``hl_gauss``."""

    bins: int = Field(default=51, gt=1, le=4096)
    """Bins, each an output of the value head."""
    min: float = 0.0
    """Lower end of the first bin. Returns below it are learnt as it."""
    max: float = 1.0
    """Upper end of the last bin. Returns above it are learnt as it."""
    sigma_ratio: float = Field(default=0.75, gt=0)
    """Standard deviation of a target's normal distribution, in widths of a bin."""


class CriticConfig(BatchingConfig):
    """The value model: update, optimizer and layout. Built for ``algorithm.adv_estimator: gae``."""

    path: str | None = None
    """Model that the critic starts from, which may be a reward model; its value head is used if it
    has one, otherwise a new one. null: ``model.path``."""
    value_head_init: ValueHeadInit = "inverse_hidden"
    """Standard deviation of the normal distribution from which a new value head is drawn; 0 gives
    zeros. initializer_range: the one of the model's config.json (transformers, verl);
    inverse_hidden: 1 / (hidden size + 1) (OpenRLHF)."""
    ppo_mini_batch_size: int | None = Field(default=None, gt=0)
    """Prompts per optimizer step. null: ``actor.ppo_mini_batch_size``."""
    ppo_epochs: int = Field(default=1, gt=0)
    """Passes over each batch."""
    shuffle: bool = False
    """Shuffle the batch's sequences in every epoch before the cut into mini-batches."""
    freeze: tuple[str, ...] = ()
    """Regular expressions; parameters in whose Hugging Face names one of them occurs are not
    trained and have neither gradients nor optimizer states (SAO: [self_attn], the attention)."""
    value_loss: Literal["mse", "hl_gauss"] = "mse"
    """mse: squared error of one number. hl_gauss: cross-entropy of a histogram against the return's
    normal distribution; the value is the histogram's mean (Farebrother et al. 2024)."""
    hl_gauss: HLGaussConfig = HLGaussConfig()
    """The histogram of the loss ``hl_gauss``."""
    cliprange_value: float | None = Field(default=0.5, gt=0)
    """Clip range of the value around the old value, for the loss ``mse``. null: no clipping."""
    value_loss_coef: float = Field(default=1.0, gt=0)
    """Coefficient of the value loss."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become the loss of a mini-batch; seq-mean-token-sum-norm divides by
    ``data.max_response_length``."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """The critic's optimizer."""
    megatron: MegatronConfig = MegatronConfig()
    """The critic's layout and Megatron-Core options."""
    router_replay: Literal["off", "R2"] = "off"
    """R2: the update uses the experts of the pass that computed the old values."""

    @property
    def histogram(self) -> HLGaussConfig | None:
        """The histogram of values; None: the value head gives one number."""
        return self.hl_gauss if self.value_loss == "hl_gauss" else None


class RefConfig(Section):
    """The frozen reference of the KL terms. A key that is null has the actor's value."""

    path: str | None = None
    """The reference's model. null: the actor's initial weights."""
    ppo_micro_batch_size_per_gpu: int | None = Field(default=None, gt=0)
    """Most sequences of a micro-batch where ``log_prob_micro_batch_size_per_gpu`` is null."""
    use_dynamic_bsz: bool | None = None
    """Also limit micro-batches by tokens."""
    ppo_max_token_len_per_gpu: int | None = Field(default=None, gt=0)
    """Most tokens per GPU where ``log_prob_max_token_len_per_gpu`` is null."""
    log_prob_micro_batch_size_per_gpu: int | None = Field(default=None, gt=0)
    """Most sequences of a micro-batch."""
    log_prob_max_token_len_per_gpu: int | None = Field(default=None, gt=0)
    """Most tokens per GPU of a micro-batch, with ``use_dynamic_bsz``."""
    head_chunk_tokens: int | None = Field(default=None, gt=0)
    """Tokens whose logits are in memory at the same time."""
    megatron: MegatronConfig | None = None
    """The reference's layout and Megatron-Core options."""

    def batching(self, actor: ActorConfig) -> BatchingConfig:
        """The reference's micro-batch limits, with the actor's where a key is null."""
        own = {key: getattr(self, key) for key in BatchingConfig.model_fields}
        actors = {key: getattr(actor, key) for key in own}
        return BatchingConfig(**actors | {k: v for k, v in own.items() if v is not None})

"""The recipe's ``reward_model`` section: a reward model on Megatron-Core."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mppo.recipe.sections.megatron import MegatronConfig
from mppo.recipe.sections.roles import DEFAULT_TOKEN_BUDGET, BatchingConfig
from mppo.recipe.sections.section import Section


class RewardModelNormalization(Section):
    """Normalisation of the reward model's scores: ``(score - mean) / std``."""

    mode: Literal["off", "given", "config", "measured"] = "off"
    """Where mean and standard deviation come from: the keys below (given), ``mean`` and ``std`` of
    the model's config.json (config), or the first responses that the run scores (measured)."""
    mean: float = 0.0
    """Mean of the mode ``given``."""
    std: float = Field(default=1.0, gt=0)
    """Standard deviation of the mode ``given``."""


class RewardModelConfig(Section):
    """A frozen model with one score per text, the output for the last token of the text."""

    path: str | None = None
    """The reward model: a ``*ForSequenceClassification`` with one label. null: no reward model."""
    enable: bool | None = None
    """false: do not use the reward model. null: use it if ``path`` is set."""
    tokenizer_path: str | None = None
    """Folder of its tokenizer. null: ``path``."""
    apply_chat_template: bool | None = None
    """Render prompt and response with the chat template of its tokenizer. false: score the text
    that the actor was given and wrote. null: ``data.apply_chat_template``."""
    max_length: int | None = Field(default=None, gt=0)
    """Most tokens of a text; of a longer one, only the last tokens are read. null: the positions
    of the model."""
    weight: float = 1.0
    """Factor of the score in the sum with the score of ``reward.*`` (``reward.weight``)."""
    normalize: RewardModelNormalization = RewardModelNormalization()
    """Normalisation of the scores."""
    clip: float | None = Field(default=None, gt=0)
    """Normalised scores are clipped to [-clip, clip]. null: not clipped."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of its parameters and activations. null: ``model.dtype``."""
    micro_batch_size_per_gpu: int = Field(default=8, gt=0)
    """Most sequences of a data-parallel rank's micro-batch."""
    use_dynamic_bsz: bool = False
    """Limit micro-batches by tokens instead (``forward_max_token_len_per_gpu``)."""
    forward_max_token_len_per_gpu: int = Field(default=DEFAULT_TOKEN_BUDGET, gt=0)
    """Most tokens per GPU of a micro-batch, with ``use_dynamic_bsz``."""
    megatron: MegatronConfig = MegatronConfig()
    """The reward model's layout and Megatron-Core options."""

    @property
    def in_use(self) -> bool:
        """Whether the run has a reward model."""
        return self.path is not None and self.enable is not False

    @property
    def batching(self) -> BatchingConfig:
        """The limits of micro-batches under the names of the other roles."""
        return BatchingConfig(
            ppo_micro_batch_size_per_gpu=self.micro_batch_size_per_gpu,
            use_dynamic_bsz=self.use_dynamic_bsz,
            ppo_max_token_len_per_gpu=self.forward_max_token_len_per_gpu,
        )

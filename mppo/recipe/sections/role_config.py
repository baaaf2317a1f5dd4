"""What a recipe says of one role, for rules, planning and building alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mppo.recipe.sections.megatron import MegatronConfig
from mppo.recipe.sections.optim import OptimConfig
from mppo.recipe.sections.roles import BatchingConfig, HLGaussConfig, ValueHeadInit

Head = Literal["policy", "value"]
"""A vocabulary projection, or a value per token."""
Replay = Literal["off", "R2", "R3"]


@dataclass(frozen=True)
class RoleConfig:
    """A role of a run; ``Recipe.roles`` has all of them.

    Args:
        name: ``actor``, ``critic``, ``ref`` or ``reward_model``.
        batching: its limits of micro-batches and its head chunk; of a trained role its section of
            the recipe.
        megatron: its layout; the actor's where ``ref.megatron`` is null.
        key: dotted key of the layout.
        path_key: dotted key of that path.
        temperature: log-probabilities are those of softmax(logits / temperature).
        optim: settings of its optimizer; None for a frozen role.
        router_replay: expert choices that the update replays (``mppo.models.moe.routing``).
        freeze: regular expressions over Hugging Face names of parameters that are not trained.
        bootstraps: a response that was cut off has a slot after its last token.
        ema_decay: decay of the moving average of the weights; None: no average.
        value_head_init: distribution of a value head that the model lacks.
        seed: seed of that value head.
        histogram: of a critic's values; None: a value head gives one number.
    """

    name: str
    batching: BatchingConfig
    megatron: MegatronConfig
    dtype: str = "bfloat16"
    key: str = "actor.megatron"
    path: str = ""
    path_key: str = "model.path"
    temperature: float = 1.0
    optim: OptimConfig | None = None
    router_replay: Replay = "off"
    freeze: tuple[str, ...] = ()
    bootstraps: bool = False
    ema_decay: float | None = None
    value_head_init: ValueHeadInit = "inverse_hidden"
    seed: int = 0
    histogram: HLGaussConfig | None = None

    @property
    def trained(self) -> bool:
        """Whether the role has an optimizer."""
        return self.optim is not None

    @property
    def end_slots(self) -> int:
        """Tokens that its passes may add to a sequence: a reward model's score belongs to the slot
        after the last token, and so does the value of the state where a response was cut off."""
        return int(self.name == "reward_model" or self.bootstraps)

    @property
    def value_bins(self) -> int:
        """Outputs of its value head."""
        return 1 if self.histogram is None else self.histogram.bins

    @property
    def head(self) -> Head:
        """Whether the model ends in a vocabulary projection or in a value per token."""
        return "value" if self.name in ("critic", "reward_model") else "policy"

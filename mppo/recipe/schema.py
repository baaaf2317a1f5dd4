"""The recipe: every section that a user may set.

Keys have verl's names. ``mppo.recipe.sections`` has the sections, with a description under each
key; checks that need more than one key are in ``mppo.recipe.rules``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr, model_validator

from mppo.recipe.sections.algorithm import AlgorithmConfig
from mppo.recipe.sections.data import DataConfig
from mppo.recipe.sections.model import ModelConfig
from mppo.recipe.sections.reward import RewardConfig
from mppo.recipe.sections.reward_model import RewardModelConfig
from mppo.recipe.sections.role_config import RoleConfig
from mppo.recipe.sections.roles import ActorConfig, CriticConfig, RefConfig
from mppo.recipe.sections.rollout import RolloutConfig
from mppo.recipe.sections.section import Section
from mppo.recipe.sections.trainer import TrainerConfig


class Recipe(Section):
    """All settings of a run."""

    model: ModelConfig = ModelConfig()
    """The model that the roles start from."""
    data: DataConfig = DataConfig()
    """Prompts for training and validation, and plain text."""
    actor: ActorConfig = ActorConfig()
    """The policy."""
    critic: CriticConfig = CriticConfig()
    """The value model, trained with ``algorithm.adv_estimator: gae``."""
    ref: RefConfig = RefConfig()
    """The frozen reference, loaded where a KL term is on."""
    rollout: RolloutConfig = RolloutConfig()
    """The engine that generates responses."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """From scores to advantages."""
    reward: RewardConfig = RewardConfig()
    """The source of scores."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """A reward model on Megatron-Core, beside the other roles."""
    trainer: TrainerConfig = TrainerConfig()
    """Length, checkpoints, reports and supervision of the run."""
    _file: Path | None = PrivateAttr(default=None)

    @property
    def file(self) -> Path | None:
        """The file that ``of_file`` has set, for messages and to find the models' configs."""
        return self._file

    def of_file(self, file: Path | None) -> Recipe:
        """This recipe as one that was read from a file."""
        named = self.model_copy()
        named._file = file
        return named

    @model_validator(mode="before")
    @classmethod
    def _reference_with_the_actors_layout(cls, document: Any) -> Any:
        """Where ``ref.megatron`` has ``offload`` alone, its other keys are the actor's."""
        if not isinstance(document, Mapping):
            return document
        actor, ref = document.get("actor"), document.get("ref")
        actors = actor.get("megatron") if isinstance(actor, Mapping) else None
        own = ref.get("megatron") if isinstance(ref, Mapping) else None
        if isinstance(actors, Mapping) and isinstance(own, Mapping) and set(own) == {"offload"}:
            return {**document, "ref": {**document["ref"], "megatron": {**actors, **own}}}
        return document

    def roles(self) -> tuple[RoleConfig, ...]:
        """The actor, then critic, reference and reward model if the run needs them."""
        roles = [self._actor()]
        if self.algorithm.uses_critic:
            roles.append(self._critic())
        if self.uses_reference:
            roles.append(self._reference())
        if self.reward_model.in_use:
            roles.append(self._reward_model())
        return tuple(roles)

    def _actor(self) -> RoleConfig:
        actor, is_fixed = self.actor, self.pretrains_value
        return RoleConfig(
            "actor",
            actor,
            actor.megatron,
            self.model.dtype,
            "actor.megatron",
            self.model.path,
            "model.path",
            self._temperature,
            optim=None if is_fixed else actor.optim,
            router_replay="off" if is_fixed else actor.router_replay,
            bootstraps=self.algorithm.bootstrap_truncated,
            ema_decay=None if is_fixed else actor.ema_decay,
        )

    def _critic(self) -> RoleConfig:
        critic = self.critic
        return RoleConfig(
            "critic",
            critic,
            critic.megatron,
            self.model.dtype,
            "critic.megatron",
            critic.path or self.model.path,
            "critic.path" if critic.path else "model.path",
            optim=critic.optim,
            router_replay=critic.router_replay,
            freeze=critic.freeze,
            bootstraps=self.algorithm.bootstrap_truncated,
            value_head_init=critic.value_head_init,
            seed=self.trainer.seed,
            histogram=critic.histogram,
        )

    def _reference(self) -> RoleConfig:
        ref, actor = self.ref, self.actor
        return RoleConfig(
            "ref",
            ref.batching(actor),
            ref.megatron or actor.megatron,
            self.model.dtype,
            "ref.megatron" if ref.megatron else "actor.megatron",
            ref.path or self.model.path,
            "ref.path" if ref.path else "model.path",
            self._temperature,
            bootstraps=self.algorithm.bootstrap_truncated,
        )

    def _reward_model(self) -> RoleConfig:
        own = self.reward_model
        assert own.path is not None, "it is in use"
        return RoleConfig(
            "reward_model",
            own.batching,
            own.megatron,
            own.dtype or self.model.dtype,
            "reward_model.megatron",
            own.path,
            "reward_model.path",
        )

    @property
    def _temperature(self) -> float:
        """Greedy sampling (temperature 0) defines no distribution: the model's own."""
        return self.rollout.temperature or 1.0

    @property
    def pretrains_value(self) -> bool:
        """Whether the run trains the critic alone (``trainer.stage``)."""
        return self.trainer.stage == "value_pretraining"

    @property
    def exported_role(self) -> str:
        """Name of the role that is exported; also of its folder in the run folder."""
        return "critic" if self.pretrains_value else "actor"

    @property
    def uses_reference(self) -> bool:
        """Whether the run needs a frozen reference: only KL terms read it."""
        in_loss = self.actor.use_kl_loss and not self.pretrains_value
        return self.algorithm.use_kl_in_reward or in_loss

    @property
    def uses_reward_section(self) -> bool:
        """Whether ``reward.*`` gives a score: with a reward model, only if it has a weight."""
        return self.reward.weight is not None or not self.reward_model.in_use

    @property
    def needs_actor_logprobs(self) -> bool:
        """Whether the actor computes the old log-probabilities, instead of using the engine's.

        The critic's loss reads them where tokens are weighed or rejected by them, or the reward
        contains a KL.
        """
        correction = self.algorithm.rollout_correction
        rejects = correction.rollout_rs or correction.rollout_token_veto_threshold
        if self.pretrains_value:
            corrects = rejects or correction.rollout_is != "off"
            return bool(corrects or self.algorithm.use_kl_in_reward)
        needed = self.needs_full_kl or self.algorithm.has_token_baseline
        return bool(not correction.bypass_mode or rejects or needed)

    @property
    def needs_full_kl(self) -> bool:
        """Whether a KL term sums over the full vocabulary."""
        penalty = self.algorithm.use_kl_in_reward and self.algorithm.kl_penalty.startswith("full")
        return penalty or (self.actor.learns_full_kl and not self.pretrains_value)

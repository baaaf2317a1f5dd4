"""Adding the recipe's agent to a rollout engine."""

from __future__ import annotations

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from mppo.agents.engine import ConversationEngine
from mppo.agents.function import AgentFunction
from mppo.agents.turn_text import TurnText
from mppo.config.schema import Recipe
from mppo.rollout.engine import RolloutEngine


def build_agent(recipe: Recipe) -> AgentFunction | None:
    """The agent of ``rollout.agent``; None without one, and for ``trainer.replay``.

    Raises:
        ConfigError: see ``AgentFunction``.
    """
    config = recipe.rollout.agent
    return None if config is None or recipe.trainer.replay is not None else AgentFunction(config)


def with_agent(
    engine: RolloutEngine,
    agent: AgentFunction | None,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
) -> RolloutEngine:
    """The engine whose responses are conversations with the agent; the same one without."""
    config = recipe.rollout.agent
    if agent is None or config is None:
        return engine
    return ConversationEngine(
        engine,
        agent,
        config.path,
        TurnText(tokenizer),
        config.max_turns,
        world=dist.get_world_size(),
    )

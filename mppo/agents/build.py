"""Adding the recipe's agent to a rollout engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from mppo.agents.engine import Agent, ConversationEngine
from mppo.agents.function import AgentFunction, CallableAgent
from mppo.agents.turn_text import TurnText
from mppo.config.schema import Recipe
from mppo.rollout.engine import RolloutEngine


def build_agent(recipe: Recipe, given: Callable[..., Any] | None = None) -> Agent | None:
    """The agent of ``rollout.agent``; None without one, and for ``trainer.replay``.

    Args:
        recipe: the recipe.
        given: the agent that ``rollout.agent.path`` names, of the program that started the run;
            None: it is imported.

    Raises:
        ConfigError: see ``AgentFunction``.
    """
    config = recipe.rollout.agent
    if config is None or recipe.trainer.replay is not None:
        return None
    return AgentFunction(config) if given is None else CallableAgent(config, given)


def with_agent(
    engine: RolloutEngine,
    agent: Agent | None,
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

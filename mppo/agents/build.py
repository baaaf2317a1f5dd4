"""Adding the recipe's agent to a rollout engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from mppo.agents.engine import ConversationEngine
from mppo.agents.function import AgentFunction, CallableAgent, check_agent
from mppo.agents.hosted_function import HostedFunction
from mppo.agents.program import CommandProgram, Program
from mppo.agents.turn_text import TurnText
from mppo.config.schema import Recipe
from mppo.config.sections.agent import AgentConfig
from mppo.rollout.engine import RolloutEngine

EpisodeAgent = AgentFunction | CallableAgent | Program
"""Answers turns of the policy, or asks for them."""


def build_agent(recipe: Recipe, given: Callable[..., Any] | None = None) -> EpisodeAgent | None:
    """The agent of ``rollout.agent``; None without one, and for ``trainer.replay``.

    Args:
        recipe: the recipe.
        given: the agent that ``rollout.agent.path`` names, of the program that started the run;
            None: it is imported.

    Raises:
        ConfigError: the agent cannot be imported, or does not accept its arguments.
    """
    config = recipe.rollout.agent
    if config is None or recipe.trainer.replay is not None:
        return None
    if given is not None:
        return CallableAgent(config, given)
    return _program(config) if config.uses_endpoint else AgentFunction(config)


def _program(config: AgentConfig) -> Program:
    if config.command is not None:
        return CommandProgram(config.command)
    assert config.run is not None, "a rule has checked it"
    check_agent(config)
    return HostedFunction(config.run, config.arguments, config.processes)


def with_agent(
    engine: RolloutEngine,
    agent: EpisodeAgent | None,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
) -> RolloutEngine:
    """The engine whose responses are episodes of the agent; the same one without."""
    config = recipe.rollout.agent
    if agent is None or config is None:
        return engine
    world = dist.get_world_size()
    if isinstance(agent, AgentFunction | CallableAgent):
        assert config.path is not None, "a rule has checked it"
        turn_text = TurnText(tokenizer)
        return ConversationEngine(
            engine, agent, config.path, turn_text, config.max_turns, world=world
        )
    from mppo.agents.episode_engine import EpisodeEngine  # needs a web server

    tokens = recipe.data.max_prompt_length + recipe.data.max_response_length
    goes_on = recipe.rollout.max_staleness > 0
    place = {"rank": dist.get_rank(), "world": world}
    return EpisodeEngine(engine, agent, tokenizer, config, tokens, goes_on=goes_on, **place)

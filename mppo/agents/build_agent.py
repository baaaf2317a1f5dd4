"""Adding the recipe's agent to a rollout engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from mppo.agents.agent_check import check_agent, imported_waits, made
from mppo.agents.agent_processes import AgentProcesses, HostedFunction
from mppo.agents.answering_program import AnsweringProgram
from mppo.agents.episode_engine import EpisodeEngine
from mppo.agents.episode_program import CommandProgram, Program
from mppo.agents.turn_answers import GivenAnswers, HostedAnswers
from mppo.recipe.schema import Recipe
from mppo.rollout.engine import RolloutEngine


def build_agent(recipe: Recipe, given: Callable[..., Any] | None = None) -> Program | None:
    """What runs the episodes of ``rollout.agent``; None without one, and for ``trainer.replay``.

    ``given``: the agent that ``rollout.agent.path`` names, of the program that started the run;
    None: it is imported. ConfigError as of ``check_agent``.
    """
    config = recipe.rollout.agent
    if config is None or recipe.trainer.replay is not None:
        return None
    if config.command is not None:
        return CommandProgram(config.command)
    if config.run is not None:
        check_agent(config)
        return HostedFunction(AgentProcesses("run", config.run, config.arguments, config.processes))
    if given is not None:
        answers = GivenAnswers(made(config, given), config.timeout_s)
    else:
        answers = HostedAnswers(config, waits=imported_waits(config))
    return AnsweringProgram(answers, config.max_turns, recipe.data.max_response_length)


def with_agent(
    engine: RolloutEngine, agent: Program | None, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> RolloutEngine:
    """The engine whose responses are episodes of the agent; the same one without."""
    config = recipe.rollout.agent
    if agent is None or config is None:
        return engine
    tokens = recipe.data.max_prompt_length + recipe.data.max_response_length
    goes_on = recipe.rollout.max_staleness > 0
    place = {"rank": dist.get_rank(), "world": dist.get_world_size()}
    return EpisodeEngine(engine, agent, tokenizer, config, tokens, goes_on=goes_on, **place)

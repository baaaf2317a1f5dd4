"""A small model behind the local engine, prompts, and the beginning of an agent's file."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from mppo.agents.answering_program import AnsweringProgram
from mppo.agents.conversation import Conversation, Reply
from mppo.agents.episode_engine import EpisodeEngine
from mppo.batch.prompt import Prompt
from mppo.hub.builtin import byte_tokenizer
from mppo.recipe.sections.agent import AgentConfig
from mppo.recipe.sections.rollout import SamplingConfig
from mppo.rollout.engine import RolloutEngine
from mppo.rollout.local.local_engine import LocalEngine

MODEL = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 2,
}
SAMPLING = SamplingConfig(n=2, stop_token_ids=tuple(range(4, 80)))
PROMPTS = [Prompt(7 * i, tuple(range(3, 4 + i * 3 % 7)), "t", str(i), f"q{i}") for i in range(4)]
OPENING = """
    import asyncio, os, sys, time
    async def say(client, messages):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content or ""
        return [*messages, {"role": "assistant", "content": text}]
"""


class Answers:
    """``TurnAnswers`` of a function in this process."""

    def __init__(self, agent: Callable[[Conversation], Reply | str]) -> None:
        self.agent = agent

    async def start(self) -> None:
        """Do nothing."""

    async def answer(self, conversation: Conversation) -> Reply | str:
        return self.agent(conversation)

    async def stop(self) -> None:
        """Do nothing."""


def answered(
    engine: RolloutEngine,
    agent: Callable[[Conversation], Reply | str],
    max_turns: int,
    limit: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **place: int,
) -> EpisodeEngine:
    """An engine whose turns a function answers; ``place``: rank and world."""
    section = AgentConfig(path="test", max_turns=max_turns)
    program = AnsweringProgram(Answers(agent), max_turns, limit)
    tokens = 16 + limit
    return EpisodeEngine(engine, program, tokenizer or byte_tokenizer(), section, tokens, **place)


def local_engine(batch_size: int = 256, config=None) -> LocalEngine:
    config = config or transformers.Qwen2Config(**MODEL)
    torch.manual_seed(0)
    source = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    engine = LocalEngine("none", config, torch.float32, batch_size=batch_size)
    engine.update_weights([list(source.state_dict().items())], 3)
    return engine

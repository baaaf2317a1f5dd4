"""A small model behind the local engine, prompts, and the beginning of an agent's file."""

from __future__ import annotations

import torch
import transformers

from mppo.batch.prompt import Prompt
from mppo.config.sections.rollout import SamplingConfig
from mppo.rollout.local.engine import LocalEngine

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

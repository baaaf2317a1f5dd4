"""Episodes a second through the endpoint, against the same requests sent to SGLang directly.

    python benchmarks/endpoint.py [--model builtin:tiny] [--episodes 64] [--turns 4] [--tokens 32]
                                  [--concurrent 16] [--repeat 5] [--out FILE]

Through the endpoint, episodes of an agent with an ``openai`` client run in a process of their own
(``rollout.agent.run``), as in training. Directly, one ``httpx`` client sends as many requests of
the same lengths to ``/generate``, each episode's in turn, with what SGLang has sampled as the
context of the next one. Each run has other prompts. Both alternate; the result has the median of
the ratios of their times a token, and the part of the context that lay in SGLang's prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import string
import tempfile
import time
from pathlib import Path
from statistics import median

import httpx
import torch
from record import parser, record
from transformers import AutoModelForCausalLM

from mppo.agents.build import build_agent
from mppo.agents.episode_engine import EpisodeEngine
from mppo.agents.running_episodes import use_metrics
from mppo.batch.prompt import Prompt
from mppo.config.load import load_recipe
from mppo.hub.builtin import load_tokenizer, resolve_model
from mppo.rollout.engine import GenerationRequest, WeightSource
from mppo.rollout.local.engine import stop_tokens
from mppo.rollout.sglang.api import sampling_parameters
from mppo.rollout.sglang.engine import SGLangEngine
from mppo.weights.bucket import WeightBucket

AGENT = """
async def run(client, task, turns, tokens):
    messages = list(task["messages"])
    for _ in range(turns):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=tokens
        )
        said = {"role": "assistant", "content": answer.choices[0].message.content or ""}
        messages = [*messages, said, {"role": "user", "content": "Go on, please."}]
    return 1.0
"""


class Case:
    """A server with a model, and episodes through the endpoint or of direct requests."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, path = options, resolve_model(options.model)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.tokenizer, agent = load_tokenizer(path), folder / "agent.py"
        agent.write_text(AGENT)
        arguments = f"{{turns: {options.turns}, tokens: {options.tokens}}}"
        recipe = load_recipe(None, [
            f"model.path={options.model}", "data.task=arithmetic", "rollout.name=sglang",
            f"rollout.agent.run={agent}:run", f"rollout.agent.arguments={arguments}",
            f"rollout.agent.max_turns={options.turns}", "rollout.start_timeout_s=1800",
            f"rollout.agent.max_concurrent={options.concurrent}",
            f"rollout.batch_size={options.concurrent}",
            "rollout.server_args={max_total_tokens: 65536}",
        ])  # fmt: skip
        self.sampling = recipe.rollout.model_copy(update={"n": 1})
        where = path, model.config, torch.float32, recipe.rollout
        self.inner = SGLangEngine(*where, run_dir=folder)
        agents, config = build_agent(recipe), recipe.rollout.agent
        assert config is not None
        limit = options.turns * (options.tokens + 64) + 128
        self.engine = EpisodeEngine(self.inner, agents, self.tokenizer, config, limit)
        bucket = WeightBucket.pack(list(model.state_dict().items()))
        self.engine.update_weights(WeightSource(lambda: iter([bucket])), 0)
        self.stops = sorted(stop_tokens(path, model.config))
        self.api = self.inner.fleet.apis[0]
        self.runs = 0

    def prompts(self) -> list[Prompt]:
        """Other prompts in every run, all of one length."""
        self.runs += 1
        chance = random.Random(self.runs)
        found = []
        for uid in range(self.options.episodes):
            text = "".join(chance.choices(string.ascii_lowercase, k=48))
            messages = ({"role": "user", "content": text},)
            ids = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=False
            )
            found.append(Prompt(uid, tuple(ids), "random", "", text, messages=messages))
        return found

    def through_endpoint(self) -> tuple[int, float]:
        """Tokens that the policy has generated, and the prefix hit rate."""
        limit = self.options.turns * self.options.tokens
        request = GenerationRequest(self.prompts(), self.sampling, limit, 0)
        found = self.engine.generate(request)
        assert not any(each.result and each.result.error for each in found)
        tokens = sum(each.length - each.inserted for each in found)
        uses = [each.result.use for each in found if each.result and each.result.use]
        return tokens, use_metrics(uses)["conversation/prefix_hit_rate"]

    def directly(self) -> tuple[int, float]:
        """As ``through_endpoint``, by requests that one client sends to the server."""
        return asyncio.run(self._directly())

    async def _directly(self) -> tuple[int, float]:
        options, free = self.options, asyncio.Semaphore(self.options.concurrent)
        parameters = sampling_parameters(self.sampling, options.tokens, self.stops)
        between = self.tokenizer("Go on, please.\n", add_special_tokens=False)["input_ids"]
        headers = {"Authorization": f"Bearer {self.inner.fleet.key}"}
        generated = cached = context = 0

        async def episode(client: httpx.AsyncClient, ids: list[int]) -> None:
            nonlocal generated, cached, context
            async with free:
                for _ in range(options.turns):
                    body = {"input_ids": ids, "sampling_params": parameters, "return_logprob": True}
                    answer = (await client.post("/generate", json=body)).raise_for_status().json()
                    said = answer["output_ids"]
                    context, generated = context + len(ids), generated + len(said)
                    cached += answer["meta_info"]["cached_tokens"]
                    ids = [*ids, *said, *between]

        where = {"base_url": self.api.url, "headers": headers, "timeout": None}
        async with httpx.AsyncClient(**where) as client:
            await asyncio.gather(
                *(episode(client, each.token_ids.tolist()) for each in self.prompts())
            )
        return generated, cached / context


def main() -> None:
    """Measure, print and record."""
    options = parser(__doc__, repeat=5)
    options.add_argument("--model", default="builtin:tiny")
    options.add_argument("--episodes", type=int, default=64)
    options.add_argument("--turns", type=int, default=4)
    options.add_argument("--tokens", type=int, default=32, help="most of a turn")
    options.add_argument("--concurrent", type=int, default=16)
    chosen = options.parse_args()
    seconds: dict[str, list[float]] = {"endpoint": [], "directly": []}
    tokens, hits = {name: 0 for name in seconds}, {name: 0.0 for name in seconds}
    with tempfile.TemporaryDirectory() as folder:
        case = Case(chosen, Path(folder))
        works = {"endpoint": case.through_endpoint, "directly": case.directly}
        try:
            for turn in range(chosen.repeat + 1):
                for name, work in works.items():
                    began = time.perf_counter()
                    found, hits[name] = work()
                    if turn:  # the first one warms up
                        seconds[name].append((time.perf_counter() - began) / found)
                        tokens[name] += found
        finally:
            case.engine.stop()
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    result = {
        name: {
            "episodes_per_s": round(
                chosen.episodes * chosen.repeat / tokens[name] / median(values), 3
            ),
            "tokens": tokens[name],
            "prefix_hit_rate": round(hits[name], 4),
        }
        for name, values in seconds.items()
    }
    result["endpoint"]["time_over_direct"] = round(median(ratios), 4)
    record({**result, "ratios": [round(each, 3) for each in ratios]}, chosen.out)


if __name__ == "__main__":
    main()

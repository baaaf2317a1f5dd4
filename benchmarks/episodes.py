"""What episodes at their own pace save, and what the endpoint of their agents costs.

    python benchmarks/episodes.py [waits] [--steps 6] [--median 1.0] [--sigma 1.0] [--repeat 2]
    python benchmarks/episodes.py endpoint [--episodes 64] [--turns 4] [--tokens 32]
                                           [--concurrent 16] [--layers 12] [--repeat 2]

**waits**: how long a step waits for agents with slow tools, by how far ahead they may run. Each
episode has two turns, and a tool between them that takes a log-normal time (median and sigma of its
logarithm by option). One SGLang server apart from the training ranks serves all runs of
``recipes/tiny_cpu_sglang_disaggregated.yaml``, ``--repeat`` times in this order:
``rollout.max_staleness`` 0, 1 and 2, the last also with ``rollout.over_sampling`` 0.25.

For each: seconds that a step waits for its batch (``timing_s/gen``), seconds of a step, and the
mean age of its tokens in updates; means over the steps after the second, of both runs.

**endpoint**: episodes through the endpoint, against the same requests sent to SGLang directly. The
agent has a client of ``openai`` in a process of its own (``rollout.agent.run``), as in training.
Directly, one ``httpx`` client then sends as many requests with the same prompts and the same
lengths to ``/generate``, each episode's one after the other, with what SGLang has sampled in the
context of the next one. SGLang's prefix cache is emptied before each. The model has the widths of
SmolLM2-135M, ``--layers`` layers and random weights. Both alternate after a round of warm-up, each
round with other prompts.

The result has medians over the rounds: the ratio of the times; milliseconds from the start of a
turn to the next one's; milliseconds of the processor per turn, of the process that sends the
requests to SGLang (with the endpoint or without), of the agent's process and of SGLang's; and the
ratio of the processor's time, which other programs on the machine hardly change.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from math import log
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeVar

import httpx
import psutil
import torch
from record import parser, record
from transformers import AutoModelForCausalLM, Qwen2Config

from mppo.agents.agent_processes import AgentProcesses, HostedFunction
from mppo.agents.episode_engine import EpisodeEngine
from mppo.agents.running_episodes import use_metrics
from mppo.batch.episode import NO_WEIGHTS, Episode
from mppo.batch.prompt import Prompt
from mppo.hub.builtin import load_tokenizer, resolve_model
from mppo.parallel.addresses import free_port
from mppo.recipe.load import load_recipe
from mppo.rollout.engine import GenerationRequest, WeightSource
from mppo.rollout.sglang.server_api import sampling_parameters
from mppo.rollout.sglang.sglang_engine import SGLangEngine
from mppo.weights.bucket import WeightBucket

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "recipes/tiny_cpu_sglang_disaggregated.yaml"
AGENT = """
import asyncio, random

def seconds(task):
    return random.Random(task).lognormvariate({mu}, {sigma})

async def run(client, task):
    messages = list(task["messages"])
    for turn in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = {{"role": "assistant", "content": answer.choices[0].message.content or ""}}
        messages = [*messages, said, {{"role": "user", "content": "more"}}]
        if not turn:
            await asyncio.sleep(seconds(task["prompt"]))
    return len(said["content"]) / 16
"""
ON_POLICY = "staleness 0"
RUNS = {
    ON_POLICY: ["rollout.agent.run={agent}:run"],
    "staleness 1": ["rollout.agent.run={agent}:run", "rollout.max_staleness=1"],
    "staleness 2": ["rollout.agent.run={agent}:run", "rollout.max_staleness=2"],
    "staleness 2, over-sampling .25": [
        "rollout.agent.run={agent}:run", "rollout.max_staleness=2", "rollout.over_sampling=0.25",
    ],
}  # fmt: skip


def steps_of(run: list[str], folder: Path, url: str, steps: int) -> list[dict[str, float]]:
    """Metrics of the steps of a run."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        "mppo/train.py", "--config", RECIPE, f"rollout.urls=[{url}]", *run,
        f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={folder}",
        "algorithm.rollout_correction.rollout_is=token", "trainer.val_before_train=false",
        "trainer.test_freq=-1", "trainer.logger=[jsonl]",
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def measure(steps: int, mu: float, sigma: float, repeat: int) -> dict[str, dict[str, float]]:
    """Means of each kind of run."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        agent = folder / "agent.py"
        agent.write_text(AGENT.format(mu=mu, sigma=sigma))
        os.environ["MPPO_ROLLOUT_API_KEY"] = secrets.token_hex(16)
        serve = ["--empty", "--config", RECIPE, "--host", "127.0.0.1", "--port", str(port)]
        server = subprocess.Popen([sys.executable, "-m", "mppo.serve", *serve], cwd=ROOT)
        try:
            for turn in range(repeat):
                for kind, keys in RUNS.items():
                    run = [key.format(agent=agent) for key in keys]
                    place = folder / f"{turn} {kind.replace(',', '')}"
                    url = f"http://127.0.0.1:{port}"
                    found[kind] += steps_of(run, place, url, steps)[2:]
        finally:
            server.terminate()
            server.wait()
    names = {
        "waits_s": "timing_s/gen",
        "step_s": "timing_s/step",
        "age": "training/weight_version_lag_mean",
    }
    return {
        kind: {short: mean(row[name] for row in rows) for short, name in names.items()}
        for kind, rows in found.items()
    }


TALKER = """
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
SHAPE = {
    "vocab_size": 260, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
"""Widths of SmolLM2-135M, with the vocabulary of ``builtin:tiny``."""
T = TypeVar("T")
Lengths = list[tuple[list[int], int]]
"""Turns of an episode: others' tokens before it, and the number of its own."""


class EndpointCase:
    """A server, and episodes through the endpoint or of direct requests.

    Args:
        options: of the command line.
        folder: for files.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        agent, name = folder / "agent.py", folder / "model"
        self.options, path = options, name
        self.tokenizer = load_tokenizer(resolve_model("builtin:tiny"))
        self.tokenizer.save_pretrained(path)
        model = AutoModelForCausalLM.from_config(
            Qwen2Config(**SHAPE, num_hidden_layers=options.layers), dtype=torch.float32
        )
        model.save_pretrained(path)
        agent.write_text(TALKER)
        arguments = f"{{turns: {options.turns}, tokens: {options.tokens}}}"
        recipe = load_recipe(None, [
            f"model.path={name}", "data.task=arithmetic", "rollout.name=sglang",
            f"rollout.agent.run={agent}:run", f"rollout.agent.arguments={arguments}",
            f"rollout.agent.max_turns={options.turns}", "rollout.start_timeout_s=1800",
            f"rollout.agent.max_concurrent={options.concurrent}",
            f"rollout.batch_size={options.concurrent}",
            "rollout.server_args={max_total_tokens: 65536}",
        ])  # fmt: skip
        self.sampling, config = recipe.rollout.model_copy(update={"n": 1}), recipe.rollout.agent
        assert config is not None
        where = path, model.config, torch.float32, recipe.rollout
        self.inner, limit = SGLangEngine(*where, run_dir=folder), options.turns * 128 + 256
        self.engine = EpisodeEngine(
            self.inner,
            HostedFunction(AgentProcesses("run", f"{agent}:run", config.arguments, 1)),
            self.tokenizer,
            config,
            limit,
        )
        bucket = WeightBucket.pack(list(model.state_dict().items()))
        self.engine.update_weights(WeightSource(lambda: iter([bucket])), 0)
        self.api = self.inner.fleet.apis[0]

    def prompts(self, number: int) -> list[Prompt]:
        """The prompts of a round, all of one length."""
        chance, found = random.Random(number), []
        for uid in range(self.options.episodes):
            text = "".join(chance.choices(string.ascii_lowercase, k=48))
            messages = ({"role": "user", "content": text},)
            ids = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=False
            )
            found.append(Prompt(uid, torch.tensor(ids), "random", "", text, messages=messages))
        return found

    def through_endpoint(self, prompts: list[Prompt]) -> list[Episode]:
        """Run an episode of each prompt."""
        limit = self.options.turns * self.options.tokens
        found = self.engine.generate(GenerationRequest(prompts, self.sampling, limit, 0))
        assert not any(each.result and each.result.error for each in found)
        return found

    def directly(self, prompts: list[Prompt], turns: list[Lengths]) -> float:
        """Send the requests of episodes with these turns; the share that the cache had."""
        return asyncio.run(self._directly(prompts, turns))

    async def _directly(self, prompts: list[Prompt], turns: list[Lengths]) -> float:
        free, cached, context = asyncio.Semaphore(self.options.concurrent), 0, 0
        headers = {"Authorization": f"Bearer {self.inner.fleet.key}"}

        async def episode(prompt: Prompt, turns: Lengths) -> None:
            nonlocal cached, context
            ids = prompt.token_ids.tolist()
            async with free:
                for given, count in turns:
                    ids = [*ids, *given]
                    how = sampling_parameters(self.sampling, count, []) | {"ignore_eos": True}
                    body = {"input_ids": ids, "sampling_params": how, "return_logprob": True}
                    answer = (await client.post("/generate", json=body)).raise_for_status().json()
                    said, context = answer["output_ids"], context + len(ids)
                    assert len(said) == count
                    cached += answer["meta_info"]["cached_tokens"]
                    ids = [*ids, *said]

        where = {"base_url": self.api.url, "headers": headers, "timeout": None}
        async with httpx.AsyncClient(**where) as client:
            await asyncio.gather(*map(episode, prompts, turns))
        return cached / context

    def processor_s(self) -> dict[str, float]:
        """Processor seconds so far of this process, the agent's, and the server's."""
        own = psutil.Process()
        found = {"sender": _seconds_of(own), "agent": 0.0, "server": 0.0}
        for each in own.children(recursive=True):
            is_agent = "mppo.agents.function_host" in each.cmdline()
            found["agent" if is_agent else "server"] += _seconds_of(each)
        return found

    def timed(self, work: Callable[..., T], *given: Any) -> tuple[T, dict[str, float]]:
        """A result, with its seconds and processor seconds; the prefix cache is empty before."""
        self.api.wait_until_idle(60.0)
        before, began = self.processor_s(), time.perf_counter()
        found = work(*given)
        seconds, after = time.perf_counter() - began, self.processor_s()
        return found, {"seconds": seconds, **{kind: after[kind] - before[kind] for kind in after}}


def _seconds_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def turns_of(episode: Episode) -> Lengths:
    """The lengths of an episode's turns, and what was said between them."""
    found: Lengths = []
    given, at, ids = [], 0, episode.here.ids.tolist()
    for version, count in episode.parts:
        if version == NO_WEIGHTS:
            given = ids[at : at + count]
        else:
            found.append((given, count))
        at += count
    return found


def measure_endpoint(options: argparse.Namespace) -> dict[str, object]:
    """Medians of rounds of both."""
    rounds: dict[str, list[dict[str, float]]] = {"endpoint": [], "directly": []}
    with tempfile.TemporaryDirectory() as name:
        case = EndpointCase(options, Path(name))
        try:
            for number in range(options.repeat + 1):
                prompts = case.prompts(number)
                episodes, through = case.timed(case.through_endpoint, prompts)
                uses = [each.result.use for each in episodes if each.result and each.result.use]
                through["prefix_hit_rate"] = use_metrics(uses)["conversation/prefix_hit_rate"]
                turns = [turns_of(each) for each in episodes]
                assert sum(map(len, turns)) == options.episodes * options.turns
                hits, direct = case.timed(case.directly, prompts, turns)
                direct["prefix_hit_rate"] = hits
                if number:  # the first one warms up
                    rounds["endpoint"].append(through)
                    rounds["directly"].append(direct)
        finally:
            case.engine.stop()
    return compared(rounds, options)


def compared(rounds: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> dict:
    """Medians, per turn, and the ratios of the times of each round."""
    count = options.episodes * options.turns
    found: dict[str, object] = {}
    for name, each in rounds.items():
        mid = {key: median(row[key] for row in each) for key in each[0]}
        found[name] = {
            "episodes_per_s": round(options.episodes / mid["seconds"], 2),
            "turn_ms": round(1e3 * options.concurrent * mid["seconds"] / count, 1),
            "processor_ms_per_turn": {
                kind: round(1e3 * mid[kind] / count, 2) for kind in ("sender", "agent", "server")
            },
            "prefix_hit_rate": round(mid["prefix_hit_rate"], 4),
        }
    pairs = [(a["seconds"], b["seconds"]) for a, b in zip(*rounds.values(), strict=True)]
    ratios = [a / b for a, b in pairs]
    works = [
        [row["sender"] + row["agent"] + row["server"] for row in each] for each in rounds.values()
    ]
    more = [1e3 * options.concurrent * (a - b) / count for a, b in pairs]
    return {
        **found,
        "time_over_direct": round(median(ratios), 3),
        "processor_over_direct": round(median(a / b for a, b in zip(*works, strict=True)), 3),
        "more_ms_per_turn": round(median(more), 1),
        "ratios": [round(each, 3) for each in ratios],
    }


def main() -> None:
    """Measure, print and record."""
    options = parser(__doc__, repeat=2)
    options.add_argument("part", nargs="?", choices=("waits", "endpoint"), default="waits")
    options.add_argument("--steps", type=int, default=6, help="waits: of a run")
    options.add_argument("--median", type=float, default=1.0, help="waits: seconds of a tool")
    options.add_argument("--sigma", type=float, default=1.0, help="waits: of the logarithm")
    options.add_argument("--episodes", type=int, default=64, help="endpoint: of a round")
    options.add_argument("--turns", type=int, default=4, help="endpoint: of an episode")
    options.add_argument("--tokens", type=int, default=32, help="endpoint: most of a turn")
    options.add_argument("--layers", type=int, default=12, help="endpoint: of the model")
    options.add_argument("--concurrent", type=int, default=16, help="endpoint: episodes at once")
    chosen = options.parse_args()
    if chosen.part == "endpoint":
        record(measure_endpoint(chosen), chosen.out)
        return
    result = measure(chosen.steps, log(chosen.median), chosen.sigma, chosen.repeat)
    for each in result.values():
        each["waits_over_on_policy"] = each["waits_s"] / result[ON_POLICY]["waits_s"]
    record({kind: _rounded(each) for kind, each in result.items()}, chosen.out)


def _rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(number, 3) for name, number in numbers.items()}


if __name__ == "__main__":
    main()

"""Routers of the actor and of SGLang: with replay the same experts, without it others near ties."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_server import forked_server
from ranks import start_ranks
from recipe_run import run_recipe, smaller
from sglang_case import START_S, needs_sglang

pytestmark = [pytest.mark.server, needs_sglang]
TEMPERATURE = 0.9
KEY = "key"


def _save_near_ties(folder: Path) -> None:
    """A model whose router scores nearly tie within triples of experts; each token uses two."""
    import transformers

    from mppo.hub.builtin import VOCAB

    config = transformers.Qwen2MoeConfig(
        vocab_size=len(VOCAB),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
            if name.endswith("mlp.gate.weight"):
                rows = parameter[::3].repeat_interleave(3, 0)
                parameter.copy_(rows * (1 + 2e-7 * torch.randn_like(rows)))
    model.save_pretrained(folder)


def _role(folder: Path, replay: str, registry):
    from transformers import AutoConfig

    from mppo.models.role import Role
    from mppo.recipe.sections.megatron import MegatronConfig
    from mppo.recipe.sections.optim import OptimConfig
    from mppo.recipe.sections.role_config import RoleConfig
    from mppo.recipe.sections.roles import BatchingConfig

    settings = RoleConfig(
        name="actor",
        dtype="float32",
        megatron=MegatronConfig(recompute_granularity="full"),
        batching=BatchingConfig(ppo_micro_batch_size_per_gpu=5),
        temperature=TEMPERATURE,
        optim=OptimConfig(lr=1e-3),
        router_replay=replay,
    )
    config, groups = AutoConfig.from_pretrained(folder), registry.of(settings.megatron.layout(1))
    return Role(settings, folder, config, groups)


def _logprobs(role, batch) -> torch.Tensor:
    """The role's log-probabilities of the response tokens."""
    from mppo.models.streamed_role import forward

    plan = role.plan(batch, training=False)
    return forward(role, batch, plan).logprobs_T[batch.response_mask_T > 0]


@dataclass(frozen=True)
class Server:
    """A running server, and the folder of its model."""

    url: str
    model: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory, forks_servers):
    from transformers import AutoConfig

    from mppo.rollout.sglang.server_options import (
        HOST,
        server_environment,
        server_options,
    )

    folder = tmp_path_factory.mktemp("near_ties")
    model = folder / "model"
    _save_near_ties(model)
    arguments = {
        "max_total_tokens": 16384,
        "disable_radix_cache": True,
        "enable_return_routed_experts": True,
    }
    config = AutoConfig.from_pretrained(model)
    options = server_options(str(model), "float32", 1, True, arguments, config)
    process = forked_server(
        0, options, server_environment(1, True, config.model_type), KEY, folder, START_S
    )
    process.start()
    try:
        yield Server(f"http://{HOST}:{process.port}", model)
    finally:
        process.stop()


def _run(rank: int, server: Server, folder: Path) -> None:
    torch.set_num_threads(1)
    from mppo.parallel import device

    device.prepare_megatron()
    from transformers import AutoConfig

    from mppo.batch.packing import pack_episodes
    from mppo.batch.prompt import Prompt
    from mppo.parallel.groups import GroupRegistry
    from mppo.recipe.sections.rollout import RolloutConfig, SamplingConfig
    from mppo.rollout.engine import GenerationRequest
    from mppo.rollout.sglang.fleet import API_KEY_VARIABLE
    from mppo.rollout.sglang.server_response import routing_shape
    from mppo.rollout.sglang.sglang_engine import SGLangEngine

    dist.init_process_group("gloo", f"file://{folder / 'store'}", rank=0, world_size=1)
    os.environ[API_KEY_VARIABLE] = KEY
    model, config = server.model, AutoConfig.from_pretrained(server.model)
    rollout = RolloutConfig(name="sglang", request_timeout_s=300.0, urls=(server.url,))
    engine = SGLangEngine(
        model, config, torch.float32, rollout, run_dir=folder, routing=routing_shape(config)
    )
    try:
        registry = GroupRegistry()
        replaying, free = (_role(model, replay, registry) for replay in ("R3", "off"))
        engine.update_weights(replaying.weights.stream(1 << 20), 0)
        generator = torch.Generator().manual_seed(1)
        prompts = [
            Prompt(
                i, tuple(torch.randint(3, 256, (4 + i,), generator=generator).tolist()), "", "", ""
            )
            for i in range(8)
        ]
        sampling = SamplingConfig(temperature=TEMPERATURE, n=4)
        episodes = engine.generate(GenerationRequest(prompts, sampling, 24, seed=0))
        batch = pack_episodes(episodes)
        torch.save(
            {
                "experts": batch.routed_experts_T,
                "engine": batch.rollout_logprobs_T[batch.response_mask_T > 0],
                "replayed": _logprobs(replaying, batch),
                "free": _logprobs(free, batch),
                "metrics": replaying.routing_metrics(),
            },
            folder / "result.pt",
        )
    finally:
        engine.stop()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def result(server, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("replay")
    start_ranks(_run, (server, folder), 1)
    return torch.load(folder / "result.pt")


def test_with_replay_the_engine_and_the_actor_agree(result) -> None:
    torch.testing.assert_close(result["replayed"], result["engine"], atol=1e-5, rtol=0)


def test_without_replay_engine_and_actor_differ_near_ties(result) -> None:
    assert (result["free"] - result["engine"]).abs().max() > 1e-2
    assert result["metrics"]["actor/moe/replay_differing"] > 0.01


def test_the_engine_returns_two_experts_for_every_token_but_the_last(result) -> None:
    experts = result["experts"][:, 1:]
    assert ((experts >= 0) == (experts[:, :1, :1] >= 0)).all()
    known = experts[experts[:, 0, 0] >= 0]
    assert (known[..., 0] != known[..., 1]).all()
    assert known.max() == 5


AGENT = """
async def run(client, task):
    messages = task["messages"]
    for word in ("more", "and"):
        if task["ground_truth"].endswith("1"):
            raise ValueError("an episode without tokens")
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = {"role": "assistant", "content": answer.choices[0].message.content or ""}
        messages = [*messages, said, {"role": "user", "content": word}]
    return len(said["content"]) / 4

def path(conversation):
    if conversation.ground_truth.endswith("1"):
        raise ValueError("no answer")
    messages = [{"role": "user", "content": "more"}]
    return {"messages": messages, "reward": len(conversation.text) / 4}
"""


@pytest.mark.parametrize("agent", ["", "run", "path"])
def test_a_moe_recipe_trains_with_the_engines_routing(server, tmp_path, agent: str) -> None:
    from mppo.hub.builtin import resolve_model
    from mppo.rollout.sglang.fleet import API_KEY_VARIABLE

    (tmp_path / "agent.py").write_text(AGENT)
    # one episode at a time: of prefixes that are computed together the cache keeps one, whose
    # experts may differ near a tie (docs/rollout.md)
    own = [
        "rollout.agent.max_concurrent=1",
        f"rollout.agent.{agent}={tmp_path}/agent.py:{agent}", "reward.on_error=0",
        "data.max_response_length=32", f"rollout.stop_token_ids={list(range(10, 60))}",
        f"rollout.start_timeout_s={START_S}", "rollout.server_args={max_total_tokens: 16384}",
    ]  # fmt: skip
    shared = ["rollout.mode=disaggregated", f"rollout.urls=[{server.url}]"]
    rows = run_recipe(
        "tiny_cpu_qwen_moe.yaml",
        tmp_path / "run",
        *smaller(2),
        f"model.path={server.model}",
        f"model.tokenizer_path={resolve_model('builtin:tiny', os.environ['MPPO_CACHE'])}",
        "trainer.warm_start_steps=0",
        "rollout.name=sglang",
        "actor.router_replay=R3",
        *(own if agent else shared),
        **{API_KEY_VARIABLE: KEY},
    )
    assert len(rows) == 2
    for row in rows:
        assert row["training/rollout_logprob_diff_max"] < 1e-5  # without R3: 1e-2 and more
        assert row["actor/grad_norm"] > 0
        assert "critic/moe/max_vio" in row
    assert rows[0]["actor/moe/replay_differing"] > 0.01
    if agent:
        assert all(row["conversation/prefix_hit_rate"] > 0 for row in rows)

"""A real SGLang server computes the actor's model, whatever a family's settings say; where it would
not, it differs and is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from forked_server import forked_server
from hf_families import (
    BASE,
    EXPERTS,
    LATENT,
    LATENT_YARN,
    LLAMA3,
    PLAIN,
    TIED,
    VOCAB,
    YARN,
    randomise,
    tensors,
)
from sglang_case import START_S, TOLERANCE, needs_sglang, own

from mppo.models.transformers_model import load_model
from mppo.recipe.load import load_recipe
from mppo.rollout.engine import WeightSource
from mppo.rollout.sglang.fleet import API_KEY_VARIABLE
from mppo.rollout.sglang.model_support import engine_issues
from mppo.rollout.sglang.server_options import HOST, server_environment, server_options
from mppo.rollout.sglang.sglang_engine import SGLangEngine
from mppo.weights.bucket import WeightBucket

pytestmark = [pytest.mark.server, needs_sglang, pytest.mark.usefixtures("forks_servers")]

EPS = {**BASE, "rms_norm_eps": 1e-2}
GEMMA = {**TIED, "head_dim": 32, "rms_norm_eps": 1e-2}
GEMMA2 = {**GEMMA, "sliding_window": 8, "query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0}
CHOSEN = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2, "n_group": 1,
    "topk_group": 1, "rms_norm_eps": 1e-2,
}  # fmt: skip
V2 = {**LATENT, **CHOSEN, "topk_method": "greedy", "norm_topk_prob": False}
V3 = {**LATENT, **CHOSEN, "norm_topk_prob": True}
LINEAR = {"rope_theta": 1e3, "rope_type": "linear", "factor": 4}
SHORT_YARN = {**YARN, "rope_theta": 100.0, "original_max_position_embeddings": 32}
MSCALES = {**LATENT_YARN, **SHORT_YARN, "mscale": 1.2, "mscale_all_dim": 0.6}

SAME: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**EPS, rope_parameters=LINEAR),
    "mistral": lambda: hf.MistralConfig(
        **{**EPS, "max_position_embeddings": 131072}, sliding_window=None, rope_parameters=LLAMA3
    ),
    "qwen2": lambda: hf.Qwen2Config(**EPS, rope_parameters={**SHORT_YARN, "attention_factor": 1.5}),
    "qwen3": lambda: hf.Qwen3Config(**EPS, head_dim=32, rope_parameters=MSCALES),
    "gemma": lambda: hf.GemmaConfig(**GEMMA),
    "gemma2": lambda: hf.Gemma2Config(**GEMMA2, attn_logit_softcapping=None),
    "gpt_neox": lambda: hf.GPTNeoXConfig(
        **PLAIN, intermediate_size=96, layer_norm_eps=1e-2,
        rope_parameters={**LINEAR, "partial_rotary_factor": 0.5},
    ),
    "opt": lambda: hf.OPTConfig(**PLAIN, ffn_dim=96),
    "glm4": lambda: hf.Glm4Config(
        **EPS, head_dim=16, pad_token_id=None,
        rope_parameters={**LINEAR, "partial_rotary_factor": 0.25},
    ),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **{**EPS, "moe_intermediate_size": 32}, n_routed_experts=8, num_experts_per_tok=2,
        head_dim=16, use_qk_norm=True, attention_bias=True, routed_scaling_factor=1.5,
    ),
    "mixtral": lambda: hf.MixtralConfig(**EPS, num_local_experts=4, sliding_window=None),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(
        **EPS, **EXPERTS, shared_expert_intermediate_size=48, rope_parameters=LINEAR
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **EPS, **EXPERTS, head_dim=32, norm_topk_prob=False, rope_parameters=SHORT_YARN
    ),
    "deepseek_v2": lambda: hf.DeepseekV2Config(
        **V2, q_lora_rank=None, routed_scaling_factor=1.5, rope_parameters=MSCALES
    ),
    "moonlight": lambda: hf.DeepseekV3Config(**V3, q_lora_rank=None, routed_scaling_factor=2.446),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**V3, q_lora_rank=24, rope_parameters=MSCALES),
    "glm4_moe_lite": lambda: hf.Glm4MoeLiteConfig(**V3, q_lora_rank=24, routed_scaling_factor=1.8),
    "seed_oss": lambda: hf.SeedOssConfig(**EPS, head_dim=32, pad_token_id=None),
    "smollm3": lambda: hf.SmolLM3Config(
        **{**EPS, "tie_word_embeddings": True}, no_rope_layers=[1, 0, 1, 0], pad_token_id=None,
        bos_token_id=1, eos_token_id=2, rope_parameters=SHORT_YARN,
    ),
}  # fmt: skip

OTHER: dict[str, Callable[[], Any]] = {
    "sliding_window": lambda: hf.MistralConfig(**BASE, sliding_window=8),
    "attn_logit_softcapping": lambda: hf.Gemma2Config(**GEMMA2, attn_logit_softcapping=3.0),
}
"""Model and changed setting, by the setting that SGLang ignores (on a CPU, or always)."""


def _saved(config: Any, folder: Path) -> Path:
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, config.model_type.startswith("gemma"))
    model.save_pretrained(folder)
    return folder


def _gap(engine: SGLangEngine, folder: Path) -> float:
    """Largest difference of a log-probability from that of the actor's model, as transformers
    computes it."""
    # SGLang may change its argument
    source = WeightSource(lambda: iter([WeightBucket.pack(tensors(folder).items())]))
    engine.update_weights(source, 1)
    tokens = torch.randint(3, VOCAB, (3, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logprobs = load_model(folder)(tokens).logits[:, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
    return (torch.tensor(engine.logprobs(tokens.tolist())) - expected).abs().max().item()


def _issues(config: Any) -> list:
    recipe = load_recipe(None, ["data.task=arithmetic", "rollout.name=sglang"])
    return list(engine_issues(recipe, config, on_cpu=True))


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Callable[[str], tuple[SGLangEngine, Path, Any]]]:
    """Engine, model folder and config by name. The next server starts while one is used."""
    makers, started = {**SAME, **OTHER}, {}

    def start(name: str) -> None:
        config, folder = makers[name](), tmp_path_factory.mktemp("served")
        model = _saved(config, folder / "model")
        engine = SGLangEngine(
            model,
            config,
            torch.float32,
            own(verify_sync="checksum"),
            run_dir=folder,
            make_server=forked_server,
        )
        started[name] = engine, model, config

    def of(name: str) -> tuple[SGLangEngine, Path, Any]:
        place = list(makers).index(name)
        for soon in list(makers)[place : place + 2]:
            if soon not in started:
                start(soon)
        return started[name]

    yield of
    for engine, *_ in started.values():
        engine.stop()


@pytest.mark.parametrize("name", SAME)
def test_the_server_computes_the_actors_model(served, name: str) -> None:
    engine, folder, config = served(name)
    assert _issues(config) == []
    assert _gap(engine, folder) < TOLERANCE
    engine.stop()


@pytest.mark.parametrize("key", OTHER)
def test_refused_settings_change_the_servers_function(served, key: str) -> None:
    engine, folder, config = served(key)
    (fault,) = _issues(config)
    assert key in fault.why
    assert _gap(engine, folder) > 1000 * TOLERANCE
    engine.stop()


def test_a_server_with_sglangs_own_class_is_refused(tmp_path, monkeypatch) -> None:
    config, folder = SAME["gemma"](), tmp_path / "model"
    options = server_options(
        str(_saved(config, folder)), "float32", 1, True, {"max_total_tokens": 4096}, config
    )
    server = forked_server(
        0, options, server_environment(1, True, "qwen2"), "key", tmp_path, START_S
    )
    server.start()
    try:
        monkeypatch.setenv(API_KEY_VARIABLE, "key")
        rollout = own(urls=(f"http://{HOST}:{server.port}",), sync="disk", server_args={})
        engine = SGLangEngine(folder, config, torch.float32, rollout, run_dir=tmp_path / "run")
        with pytest.raises(RuntimeError, match="computes the exact GELU instead of hidden_act"):
            engine.update_weights([], 1)
        # it is, though it would take the weights of a family that needs no class of mppo's
        config.model_type = "llama"
        engine = SGLangEngine(folder, config, torch.float32, rollout, run_dir=tmp_path / "run")
        assert _gap(engine, folder) > 10 * TOLERANCE
    finally:
        server.stop()

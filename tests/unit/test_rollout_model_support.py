"""A recipe is refused if, and only if, SGLang would not compute the actor's function."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as hf
from hf_families import BASE, EXPERTS, LATENT, LATENT_YARN, LLAMA3, PLAIN, TIED, YARN

from mppo import register
from mppo.recipe.errors import ConfigError
from mppo.recipe.load import load_recipe
from mppo.rollout.sglang.model_support import SERVED, engine_issues, sglang_settings
from mppo.rollout.sglang.server_options import server_environment, server_options
from mppo.trainer.start.loading import load_checked

WINDOW = 100
LINEAR = {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
PER_LAYER = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
MOE = {**BASE, **EXPERTS}
SHARED = {**MOE, "shared_expert_intermediate_size": 48}
CHOSEN = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
V2 = {**LATENT, **CHOSEN, "q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False}
V3 = {**LATENT, **CHOSEN, "q_lora_rank": 24, "norm_topk_prob": True}
MIXTRAL = {**BASE, "num_local_experts": 4, "sliding_window": None}
GEMMA = {**TIED, "head_dim": 32}
GEMMA2 = {**GEMMA, "attn_logit_softcapping": None, "sliding_window": WINDOW}
BACKUP = "rollout.server_args={enable-weights-cpu-backup: true}"
LAYERS = ["sliding_attention", "full_attention"] * 2

FITS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**BASE),
    "llama tied": lambda: hf.LlamaConfig(**TIED, rope_parameters=LLAMA3),
    "llama linear": lambda: hf.LlamaConfig(**BASE, rope_parameters=LINEAR),
    "llama eps": lambda: hf.LlamaConfig(**{**BASE, "rms_norm_eps": 1e-3}, head_dim=32),
    "mistral": lambda: hf.MistralConfig(**BASE, sliding_window=None),
    "mistral yarn": lambda: hf.MistralConfig(**BASE, sliding_window=None, rope_parameters=YARN),
    "qwen2": lambda: hf.Qwen2Config(**BASE, sliding_window=WINDOW, use_sliding_window=False),
    "qwen2 yarn": lambda: hf.Qwen2Config(
        **TIED, rope_parameters={**YARN, "attention_factor": 1.5, "truncate": False}
    ),
    "qwen3": lambda: hf.Qwen3Config(**BASE, head_dim=32, rope_parameters=YARN),
    "gemma": lambda: hf.GemmaConfig(**GEMMA),
    "gemma exact": lambda: hf.GemmaConfig(**GEMMA, hidden_activation="gelu"),
    "gemma gelu": lambda: hf.GemmaConfig(**GEMMA, hidden_act="gelu"),
    "gemma2": lambda: hf.Gemma2Config(
        **GEMMA2, final_logit_softcapping=3.0, query_pre_attn_scalar=24, layer_types=LAYERS
    ),
    "gpt_neox": lambda: hf.GPTNeoXConfig(
        **PLAIN, hidden_act="gelu_fast",
        rope_parameters={**LINEAR, "partial_rotary_factor": 0.5},
    ),
    "opt": lambda: hf.OPTConfig(**PLAIN),
    "glm4": lambda: hf.Glm4Config(**BASE, head_dim=16),
    "glm4_moe": lambda: hf.Glm4MoeConfig(**MOE, head_dim=16),
    "mixtral": lambda: hf.MixtralConfig(**MIXTRAL),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**SHARED, rope_parameters=LINEAR),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**MOE, head_dim=32, rope_parameters=YARN),
    "deepseek_v2": lambda: hf.DeepseekV2Config(**V2, rope_parameters=LATENT_YARN),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**V3, rope_parameters=LATENT_YARN),
    "moonlight": lambda: hf.DeepseekV3Config(**{**V3, "rms_norm_eps": 1e-5, "q_lora_rank": None}),
    "glm4_moe_lite": lambda: hf.Glm4MoeLiteConfig(**V3),
    "seed_oss": lambda: hf.SeedOssConfig(**BASE, head_dim=32),
    "smollm3": lambda: hf.SmolLM3Config(**TIED, pad_token_id=None),
}  # fmt: skip

DIFFERS: dict[str, tuple[Any, str]] = {
    "llama activation": (
        lambda: hf.LlamaConfig(**BASE, hidden_act="gelu"),
        "hidden_act = 'gelu', and SGLang 0.5 computes silu",
    ),
    "llama final cap": (
        lambda: hf.LlamaConfig(**BASE, final_logit_softcapping=30.0),
        "final_logit_softcapping = 30.0, and SGLang 0.5 caps the logits",
    ),
    "llama bias": (lambda: hf.LlamaConfig(**BASE, bias=True), "bias = True"),
    "mistral window": (
        lambda: hf.MistralConfig(**BASE, sliding_window=WINDOW),
        "sliding_window = 100, and SGLang 0.5 ignores it (the actor slides it in 4 of 4 layers)",
    ),
    "qwen2 window": (
        lambda: hf.Qwen2Config(**BASE, **PER_LAYER), "the actor slides it in 2 of 4 layers"
    ),
    "qwen2 activation": (lambda: hf.Qwen2Config(**BASE, hidden_act="gelu"), "computes silu"),
    "qwen2 chunks": (
        lambda: hf.Qwen2Config(**BASE, dual_chunk_attention_config={"chunk_size": 64}),
        "dual_chunk_attention_config = {'chunk_size': 64}",
    ),
    "qwen3 window": (lambda: hf.Qwen3Config(**BASE, head_dim=32, **PER_LAYER), "in 2 of 4"),
    "gemma activation": (
        lambda: hf.GemmaConfig(**GEMMA, hidden_act="silu"),
        "hidden_act = 'silu', and SGLang 0.5 computes gelu or gelu_pytorch_tanh",
    ),
    "gemma rope": (
        lambda: hf.GemmaConfig(**GEMMA, rope_parameters=LINEAR), "does not scale positions"
    ),
    "gemma untied": (
        lambda: hf.GemmaConfig(**{**GEMMA, "tie_word_embeddings": False}),
        "tie_word_embeddings = False, and SGLang 0.5 projects with the embeddings",
    ),
    "gemma2 activation": (
        lambda: hf.Gemma2Config(**GEMMA2, hidden_activation="gelu"),
        "hidden_activation = 'gelu', and SGLang 0.5 computes gelu_pytorch_tanh",
    ),
    "gemma2 window": (
        lambda: hf.Gemma2Config(**GEMMA2, layer_types=LAYERS[::-1]),
        "slides it in every other layer, from the first (the actor slides it in 2 of 4 layers)",
    ),
    "gemma2 rope": (
        lambda: hf.Gemma2Config(**GEMMA2, rope_parameters=LINEAR), "rope_type = 'linear'"
    ),
    "mixtral window": (
        lambda: hf.MixtralConfig(**{**MIXTRAL, "sliding_window": WINDOW}), "in 4 of 4 layers"
    ),
    "mixtral rope": (lambda: hf.MixtralConfig(**MIXTRAL, rope_parameters=YARN), "'yarn'"),
    "mixtral theta": (
        lambda: hf.MixtralConfig(
            **MIXTRAL, rope_parameters={"rope_theta": 0.5, "rope_type": "default"}
        ),
        "rope_theta = 0.5, and SGLang 0.5 truncates it to 0",
    ),
    "mixtral tied": (
        lambda: hf.MixtralConfig(**{**MIXTRAL, "tie_word_embeddings": True}),
        "tie_word_embeddings = True, and SGLang 0.5 has a separate projection",
    ),
    "mixtral width": (lambda: hf.MixtralConfig(**MIXTRAL, head_dim=32), "head_dim = 32"),
    "mixtral activation": (lambda: hf.MixtralConfig(**MIXTRAL, hidden_act="gelu"), "silu"),
    "opt activation": (
        lambda: hf.OPTConfig(**PLAIN, activation_function="gelu_new"),
        "activation_function = 'gelu_new', and SGLang 0.5 computes relu or gelu in a opt",
    ),
    "qwen2_moe window": (lambda: hf.Qwen2MoeConfig(**SHARED, **PER_LAYER), "in 1 of 4"),
    "qwen2_moe width": (
        lambda: hf.Qwen2MoeConfig(**SHARED, head_dim=32), "gives the heads of a qwen2_moe width 16"
    ),
    "qwen3_moe window": (
        lambda: hf.Qwen3MoeConfig(**MOE, use_sliding_window=True, sliding_window=WINDOW),
        "in 4 of 4 layers",
    ),
    "qwen3_moe activation": (lambda: hf.Qwen3MoeConfig(**MOE, hidden_act="gelu"), "silu"),
    "deepseek_v2 tied": (
        lambda: hf.DeepseekV2Config(**{**V2, "tie_word_embeddings": True}), "a separate projection"
    ),
    "deepseek_v3 activation": (lambda: hf.DeepseekV3Config(**V3, hidden_act="gelu"), "silu"),
}  # fmt: skip


def recipe(*overrides: str, engine: str = "sglang", prompt: int = 50, response: int = 51):
    lengths = [f"data.max_prompt_length={prompt}", f"data.max_response_length={response}"]
    return load_recipe(
        None, ["data.task=arithmetic", f"rollout.name={engine}", *lengths, *overrides]
    )


def test_every_family_is_in_the_table() -> None:
    assert SERVED.keys() == set(register.family.own)
    assert {make().model_type for make in FITS.values()} == set(register.family.own)


@pytest.mark.parametrize("name", FITS)
def test_settings_that_sglang_supports_are_accepted(name: str) -> None:
    assert list(engine_issues(recipe(), FITS[name](), on_cpu=True)) == []


@pytest.mark.parametrize("name", DIFFERS)
def test_settings_that_sglang_computes_differently_are_refused(name: str) -> None:
    make, why = DIFFERS[name]
    (issue,) = engine_issues(recipe(), make(), on_cpu=False)
    assert (issue.key, issue.value) == ("rollout.name", "sglang")
    assert why in issue.why
    assert "set rollout.name to local" in issue.fix
    assert list(engine_issues(recipe(engine="local"), make(), on_cpu=False)) == []


@pytest.mark.parametrize("name", [name for name in DIFFERS if "window" in name])
def test_a_window_that_holds_the_sequences_does_not_matter(name: str) -> None:
    make, _ = DIFFERS[name]
    assert list(engine_issues(recipe(response=50), make(), on_cpu=False)) == []
    (issue,) = engine_issues(recipe(), make(), on_cpu=False)
    assert "may have 101 tokens" in issue.why
    assert "data.max_prompt_length + data.max_response_length within 100" in issue.fix


def test_soft_capped_scores_need_a_backend_that_caps() -> None:
    config = hf.Gemma2Config(**{**GEMMA2, "attn_logit_softcapping": 50.0})
    assert server_options("/m", "bfloat16", 1, False, {}, config)["attention_backend"] == (
        "flashinfer"
    )
    assert list(engine_issues(recipe(), config, on_cpu=False)) == []
    (issue,) = engine_issues(recipe(), config, on_cpu=True)
    assert "on a CPU, torch_native, ignores config.json's attn_logit_softcapping = 50.0" in (
        issue.why
    )
    for key in ("attention_backend", "decode-attention-backend"):
        chosen = recipe(f"rollout.server_args={{{key}: trtllm_mha}}")
        (issue,) = engine_issues(chosen, config, on_cpu=False)
        assert issue.key == f"rollout.server_args.{key.replace('-', '_')}"
        assert issue.value == "trtllm_mha"
    chosen = recipe("rollout.server_args={attention_backend: intel_amx}")
    assert list(engine_issues(chosen, config, on_cpu=True)) == []
    uncapped = hf.Gemma2Config(**GEMMA2)
    assert list(engine_issues(recipe(), uncapped, on_cpu=True)) == []
    assert "attention_backend" not in server_options("/m", "bfloat16", 1, False, {}, uncapped)


def test_changes_need_weights_that_survive_the_sleep_of_a_server() -> None:
    config, delta = FITS["qwen2"](), "rollout.sync_mode=delta"
    (issue,) = engine_issues(recipe(delta), config, on_cpu=False)
    assert (issue.key, issue.value) == ("rollout.sync_mode", "delta")
    assert "rollout.server_args.enable_weights_cpu_backup to true" in issue.fix
    assert list(engine_issues(recipe(delta, BACKUP), config, on_cpu=False)) == []
    assert list(engine_issues(recipe(delta), config, on_cpu=True)) == []


PADDED = [
    ("llama", {"intermediate_size": 408}, 2),
    ("gpt_neox", {"intermediate_size": 400}, 1),
    ("glm4_moe", {"intermediate_size": 384, "moe_intermediate_size": 96}, 2),
    ("qwen2_moe", {"intermediate_size": 64, "shared_expert_intermediate_size": 48}, 1),
]


@pytest.mark.parametrize(("family", "widths", "ranks"), PADDED, ids=[r[0] for r in PADDED])
def test_slices_are_refused_where_a_server_on_a_cpu_pads_widths(family, widths, ranks) -> None:
    config = FITS[family]()
    aligned = {"intermediate_size": 384, "moe_intermediate_size": 64}
    for key, width in aligned.items():
        if hasattr(config, key):
            setattr(config, key, width)
    if hasattr(config, "shared_expert_intermediate_size"):
        config.shared_expert_intermediate_size = 128
    size = f"rollout.tensor_model_parallel_size={ranks}"
    for mode in ("sliced", "delta"):
        sliced = recipe(f"rollout.sync_mode={mode}", size, BACKUP)
        assert list(engine_issues(sliced, config, on_cpu=True)) == []
    for key, width in widths.items():
        setattr(config, key, width)
    for mode in ("sliced", "delta"):
        sliced = recipe(f"rollout.sync_mode={mode}", size, BACKUP)
        (issue,) = engine_issues(sliced, config, on_cpu=True)
        assert (issue.key, issue.value) == ("rollout.sync_mode", mode)
        assert f"{list(widths)[-1]} = {list(widths.values())[-1]}" in issue.why
        assert f"multiple of {32 * ranks} " in issue.why
        assert list(engine_issues(sliced, config, on_cpu=False)) == []
    assert list(engine_issues(recipe(size), config, on_cpu=True)) == []


def test_rotary_scaling_is_translated_for_sglang() -> None:
    reported = sglang_settings(FITS["qwen2 yarn"]())["rope_parameters"]
    assert reported["truncate"] is False
    # SGLang has no attention_factor: (0.1 mscale ln(4) + 1) / (0.1 * 0 ln(4) + 1) is 1.5
    assert reported["mscale"] == pytest.approx(0.5 / 0.13862943611)
    assert reported["mscale_all_dim"] == 0.0
    complete = hf.LlamaConfig(**BASE, rope_parameters={**LINEAR, "factor": 4})
    factor = sglang_settings(complete)["rope_parameters"]["factor"]
    assert isinstance(factor, float), "SGLang takes a whole number for a list of factors"
    assert sglang_settings(FITS["gpt_neox"]())["rope_parameters"]["partial_rotary_factor"] == 0.5
    assert sglang_settings(FITS["llama"]()) == {}


def test_a_servers_groups_of_experts_are_the_actors() -> None:
    config = hf.DeepseekV2Config(**{**V2, "n_group": 4, "topk_group": 2})
    reported = sglang_settings(config)
    assert (reported["n_group"], reported["topk_group"]) == (1, 1)
    assert reported["scoring_func"] == "softmax"


def test_weights_are_sent_dequantised() -> None:
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    reported = sglang_settings(hf.DeepseekV3Config(**V3, quantization_config=quantised))
    assert reported["quantization_config"] is None


@pytest.mark.parametrize("name", FITS)
def test_own_classes_are_selected_where_sglangs_differ(name: str) -> None:
    model_type = FITS[name]().model_type
    requested = "SGLANG_EXTERNAL_MODEL_PACKAGE" in server_environment(1, False, model_type)
    own = {"gemma", "gpt_neox", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "seed_oss"}
    assert requested == (model_type in own | {"smollm3"})


def test_the_recipe_is_refused_before_any_model_is_built() -> None:
    overrides = ["data.task=arithmetic", "rollout.name=sglang"]

    def read(path: str):
        return hf.MistralConfig(**{**BASE, "max_position_embeddings": 2048}, sliding_window=WINDOW)

    def judge(recipe, config):
        return engine_issues(recipe, config, on_cpu=False)

    with pytest.raises(ConfigError, match="sliding_window = 100") as raised:
        load_checked(None, overrides, 1, read, files=False, engine_check=judge)
    assert [issue.key for issue in raised.value.issues] == ["rollout.name"]

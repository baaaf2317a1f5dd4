"""How SGLang 0.5 interprets config.json, by family, and where its model differs from the actor's.

SGLang silently ignores settings that it does not support, and then computes the log-probabilities
of another model. Settings that can be passed to SGLang are passed (``sglang_settings``,
``MODEL_PACKAGE``); a recipe with any other difference is refused (``engine_issues``). Source:
``srt/models`` and ``srt/layers`` of SGLang 0.5.21.

The local engine needs no such table: its model comes from the same configuration as the actor's
(``mppo.models.transformers_model``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mppo import register
from mppo.models.families.architectures import family_config
from mppo.models.families.family import ACTIVATIONS, FamilyConfig, activation_key
from mppo.models.families.rope import LLAMA3_FIXED, mla_rope, plain_rope
from mppo.recipe.errors import ConfigIssue
from mppo.recipe.model_shape import (
    MLA_FAMILIES,
    ModelShape,
    family_like,
    model_shape,
    rope_parameters,
)
from mppo.recipe.rules.engine_rules import sglang_options
from mppo.recipe.schema import Recipe

_PLAIN_ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Served:
    """What SGLang supports in a family's config.json.

    Args:
        every_other_window: the window slides in layers 0, 2, 4...; False: in no layer.
        ties: supported values of ``tie_word_embeddings``.
        takes_head_dim: heads have the width ``head_dim``; False: ``hidden_size`` / heads.
        integer_theta: ``rope_theta`` is truncated to an integer.
        reads: settings that SGLang supports and the actor does not, with their neutral values.
    """

    activations: tuple[str, ...] = ("silu",)
    ropes: tuple[str, ...] = _PLAIN_ROPES
    every_other_window: bool = False
    ties: tuple[bool, ...] = (False, True)
    takes_head_dim: bool = True
    integer_theta: bool = False
    reads: Mapping[str, Any] = field(default_factory=dict)


_LLAMA = Served(
    reads={
        "bias": False,
        "rope_is_neox_style": True,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": None,
    }
)
_QWEN = Served(reads={"dual_chunk_attention_config": None, "original_num_attention_heads": None})
_MLA = Served(ropes=("default", "yarn"), ties=(False,))
SERVED: dict[str, Served] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _QWEN,
    "qwen3": Served(),
    "gemma": Served(("gelu", "gelu_pytorch_tanh"), ("default",), ties=(True,)),
    "gemma2": Served(
        ("gelu_pytorch_tanh",), ("default",), every_other_window=True, ties=(True,)
    ),
    "mixtral": Served(
        ropes=("default",), ties=(False,), takes_head_dim=False, integer_theta=True
    ),
    "qwen2_moe": Served(takes_head_dim=False, reads={"dual_chunk_attention_config": None}),
    "qwen3_moe": Served(reads={"dual_chunk_attention_config": None}),
    "gpt_neox": Served(tuple(ACTIVATIONS), ("default", "linear")),
    "opt": Served(("relu", "gelu")),
    "glm4": Served(ropes=("default", "linear")),
    "glm4_moe": Served(ropes=("default", "linear"), ties=(False,)),
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "glm4_moe_lite": Served(ropes=("default",), ties=(False,)),
    "seed_oss": Served(ropes=("default",)),
    "smollm3": Served(),
}  # fmt: skip

MODEL_PACKAGE = "mppo.rollout.sglang_models"
"""Classes that replace SGLang's in servers started by mppo (``SGLANG_EXTERNAL_MODEL_PACKAGE`` in
SGLang's documentation)."""
_MLA_CLASS = "uses rms_norm_eps in MLA's inner norms instead of 1e-6"
OWN_CLASSES = {
    "gemma": "computes the exact GELU instead of hidden_act",
    "gpt_neox": "does not exist",
    "deepseek_v2": _MLA_CLASS,
    "deepseek_v3": _MLA_CLASS,
    "glm4_moe_lite": _MLA_CLASS,
    "seed_oss": "does not exist",
    "smollm3": "does not exist",
}
"""Families with a class in ``MODEL_PACKAGE``, and how SGLang's own class differs."""

CAPPED_BACKEND = "flashinfer"
"""The attention backend on GPUs for models with soft-capped scores; on some GPUs, SGLang's default
backend ignores the cap."""
_CAPPING = ("fa3", "flashinfer", "triton", "intel_amx")
"""Attention backends that apply a layer's soft-cap."""
CPU_BACKEND = "torch_native"
_CPU_WIDTH = 32
"""Multiple, for each tensor-parallel rank, to which SGLang pads feed-forward widths on a CPU
(``srt/configs/update_config.py``); on a GPU it pads none."""
_PADDED_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_BACKUP = "enable_weights_cpu_backup"
_BACKEND_KEYS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")

_UNSTATED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "moe_layer_freq": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v3": {
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
    },
}
"""Settings that SGLang needs in config.json, while transformers implies them and does not save
them."""


def sglang_settings(hf_config: Any) -> dict[str, Any]:
    """Overrides of config.json, by key, with which SGLang's model equals the actor's."""
    model_type = hf_config.model_type
    unstated = _UNSTATED.get(model_type, {})
    settings = {k: v for k, v in unstated.items() if getattr(hf_config, k, None) is None}
    if model_type == "deepseek_v2":
        settings |= {"n_group": 1, "topk_group": 1}  # the actor's router has no groups
    if model_type == "glm4_moe_lite":  # SGLang reads the kinds of layers under this key
        settings["first_k_dense_replace"] = model_shape(hf_config).sparse_layers.count(False)
    if model_type == "gemma2":  # SGLang needs both keys; transformers saves one of them
        activation = family_config(hf_config).activation
        settings |= {"hidden_act": activation, "hidden_activation": activation}
    if rope_parameters(hf_config)["rope_type"] != "default":
        settings["rope_parameters"] = _rope(hf_config)
    if getattr(hf_config, "quantization_config", None) is not None:
        settings["quantization_config"] = None  # weights are sent dequantised
    return settings


def _rope(hf_config: Any) -> dict[str, Any]:
    stated = rope_parameters(hf_config)
    kept = ("rope_type", "rope_theta", "partial_rotary_factor")
    common = {key: stated[key] for key in kept if key in stated}
    if family_like(hf_config) in MLA_FAMILIES:
        latent = mla_rope(hf_config)
        kept = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale")
        kept += ("mscale_all_dim",)
        found = {key: latent[key] for key in kept if key in latent}
        return common | found | {"factor": latent["rotary_scaling_factor"]}
    if stated["rope_type"] != "yarn":
        constants = LLAMA3_FIXED if stated["rope_type"] == "llama3" else {}
        return common | constants | {"factor": float(stated["factor"])}
    _, yarn = plain_rope(hf_config)
    found = {
        "factor": yarn["yarn_rotary_scaling_factor"],
        "original_max_position_embeddings": yarn["yarn_original_max_position_embeddings"],
        "beta_fast": yarn["yarn_beta_fast"],
        "beta_slow": yarn["yarn_beta_slow"],
        "truncate": yarn["yarn_correction_range_round_to_int"],
    }
    if yarn["yarn_mscale"] is not None:
        found["mscale"] = yarn["yarn_mscale"]
        found["mscale_all_dim"] = yarn["yarn_mscale_all_dim"]
    return common | found


def engine_issues(recipe: Recipe, hf_config: Any, on_cpu: bool) -> Iterator[ConfigIssue]:
    """Recipes whose rollout engine would compute another model than the actor, or lose weights;
    ValueError if the actor does not support the model either."""
    if recipe.rollout.name != "sglang":
        return
    actor, shape = family_config(hf_config), model_shape(hf_config)
    served = SERVED.get(shape.model_type) or register.family.traits(shape.model_type).served
    if served is None:
        why = f"its plugin does not say what SGLang supports in a {shape.model_type}"
        fix = "register the family with served=, or set rollout.name to local"
        yield ConfigIssue("rollout.name", "sglang", why, fix)
        return
    longest = recipe.data.max_prompt_length + recipe.data.max_response_length
    found = [
        *_layer_differences(hf_config, actor, shape, served),
        *_window_differences(hf_config, actor, longest, served),
        *_unknown_settings(hf_config, served),
    ]
    for key, value, why, fix in found:
        why = f"config.json says {key} = {value!r}, and SGLang 0.5 {why}"
        fix = f"{fix}set rollout.name to local, which computes the actor's model"
        yield ConfigIssue("rollout.name", "sglang", why, fix)
    yield from _cap_issues(recipe, actor, on_cpu)
    yield from _delta_issues(recipe, on_cpu)
    if on_cpu:
        yield from _padding_issues(recipe, hf_config)


Difference = tuple[str, Any, str, str]
"""A key of config.json, its value, what SGLang does with it, and a fix other than the local engine
(may be empty)."""


def _layer_differences(
    hf_config: Any, actor: FamilyConfig, shape: ModelShape, served: Served
) -> Iterator[Difference]:
    family = shape.model_type
    if actor.activation not in served.activations:
        key = activation_key(hf_config)
        why = f"computes {' or '.join(served.activations)} in a {family}"
        yield key, actor.activation, why, ""
    rope = rope_parameters(hf_config)
    if rope["rope_type"] not in served.ropes:
        why = f"does not scale positions of a {family}"
        yield "rope_parameters.rope_type", rope["rope_type"], why, ""
    if served.integer_theta and rope["rope_theta"] != int(rope["rope_theta"]):
        why = f"truncates it to {int(rope['rope_theta'])} in a {family}"
        yield "rope_parameters.rope_theta", rope["rope_theta"], why, ""
    if shape.tied not in served.ties:
        does = "has a separate projection" if shape.tied else "projects with the embeddings"
        yield "tie_word_embeddings", shape.tied, f"{does} in a {family}", ""
    width = shape.hidden // shape.heads
    if not served.takes_head_dim and shape.head_dim != width:
        yield "head_dim", shape.head_dim, f"gives the heads of a {family} width {width}", ""
    cap = getattr(hf_config, "final_logit_softcapping", None)
    if (cap or None) != (actor.final_logit_softcap or None):
        why = f"caps the logits, while the actor's {family} does not"
        yield "final_logit_softcapping", cap, why, ""


def _window_differences(
    hf_config: Any, actor: FamilyConfig, longest: int, served: Served
) -> Iterator[Difference]:
    """Layers in which only one of SGLang and the actor slides a window, if sequences exceed it."""
    ours = actor.layer_windows
    size = getattr(hf_config, "sliding_window", None)
    every_other = served.every_other_window
    theirs = [size if every_other and not i % 2 else None for i in range(len(ours))]
    other = [i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]]
    if other and size is not None and size < longest:
        slides = "slides it in every other layer, from the first" if every_other else "ignores it"
        layers = f"the actor slides it in {sum(w is not None for w in ours)} of {len(ours)} layers"
        why = f"{slides} ({layers}), while prompt and response may have {longest} tokens"
        lower = f"keep data.max_prompt_length + data.max_response_length within {size}, or "
        yield "sliding_window", size, why, lower


def _unknown_settings(hf_config: Any, served: Served) -> Iterator[Difference]:
    for key, neutral in served.reads.items():
        value = getattr(hf_config, key, None)
        if value is not None and value != neutral:
            why = f"applies it in a {hf_config.model_type}, while the actor has no such setting"
            yield key, value, why, ""


def _cap_issues(recipe: Recipe, actor: FamilyConfig, on_cpu: bool) -> Iterator[ConfigIssue]:
    """Attention backends that ignore the soft-cap of scores."""
    cap = actor.attn_logit_softcap
    given = sglang_options(recipe.rollout.server_args)
    backends = {key: given[key] for key in _BACKEND_KEYS if given.get(key)}
    why = f"ignores config.json's attn_logit_softcapping = {cap}"
    capping = ", ".join(_CAPPING)
    for key, backend in backends.items():
        if cap and backend not in _CAPPING:
            fix = f"leave it out, or use one that caps scores: {capping}"
            yield ConfigIssue(f"rollout.server_args.{key}", backend, f"this backend {why}", fix)
    if cap and on_cpu and _BACKEND_KEYS[0] not in backends:
        why = f"SGLang's attention backend on a CPU, {CPU_BACKEND}, {why}"
        fix = "run on GPUs, or set rollout.name to local"
        yield ConfigIssue("rollout.name", "sglang", why, fix)


def _delta_issues(recipe: Recipe, on_cpu: bool) -> Iterator[ConfigIssue]:
    """Servers on a GPU that lose, while they sleep, the weights that changes are relative to."""
    given = sglang_options(recipe.rollout.server_args)
    if recipe.rollout.sync_mode != "delta" or on_cpu or given.get(_BACKUP):
        return
    yield ConfigIssue(
        "rollout.sync_mode",
        "delta",
        "sends changes relative to the weights in the servers, which give up their GPU memory "
        "while they sleep",
        f"set rollout.server_args.{_BACKUP} to true (it keeps the weights in host memory), or set "
        "sync_mode to sliced",
    )


def _padding_issues(recipe: Recipe, hf_config: Any) -> Iterator[ConfigIssue]:
    """Slices of parameters that SGLang's CPU server pads, and so cuts elsewhere."""
    rollout = recipe.rollout
    multiple = _CPU_WIDTH * rollout.tensor_model_parallel_size
    widths = {key: getattr(hf_config, key, None) or 0 for key in _PADDED_WIDTHS}
    padded = [f"{key} = {width}" for key, width in widths.items() if width % multiple]
    if rollout.sync_mode != "full" and padded:
        yield ConfigIssue(
            "rollout.sync_mode",
            rollout.sync_mode,
            f"sends slices of the model's own widths, while SGLang on a CPU pads {padded[0]} to a "
            f"multiple of {multiple} (rollout.tensor_model_parallel_size times {_CPU_WIDTH})",
            "set sync_mode to full, or run on GPUs, where SGLang pads no width",
        )

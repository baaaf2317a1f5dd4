"""What SGLang 0.5 computes of a config.json, family by family, and where the actor computes more.

SGLang ignores settings it does not know: nothing is said, and every log-probability is another
model's. What it can be told it is told (``sglang_settings``, ``MODEL_PACKAGE``), the rest is
refused (``engine_issues``). Read from SGLang 0.5.21's ``srt/models`` and ``srt/layers``.

The local engine needs no such table: its model is built from what the actor's is built from
(``mppo.models.transformers_model``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mppo.config.errors import ConfigIssue
from mppo.config.schema import Recipe
from mppo.models.families.architectures import FamilyConfig, family_config
from mppo.models.families.rope import LLAMA3_FIXED, mla_rope, plain_rope
from mppo.weights.shape import MLA_FAMILIES, ModelShape, model_shape, rope_parameters

_PLAIN_ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Served:
    """What SGLang takes from a family's config.json.

    Args:
        activations: those it computes.
        ropes: kinds of rotary scaling it computes.
        every_other_window: it slides the window in layers 0, 2, 4...; else in none.
        ties: values of ``tie_word_embeddings`` it obeys.
        takes_head_dim: heads have the width ``head_dim``; else ``hidden_size`` over their number.
        whole_theta: it cuts ``rope_theta`` to a whole number.
        reads: settings it obeys and the actor does not know, and with which value they say nothing.
    """

    activations: tuple[str, ...] = ("silu",)
    ropes: tuple[str, ...] = _PLAIN_ROPES
    every_other_window: bool = False
    ties: tuple[bool, ...] = (False, True)
    takes_head_dim: bool = True
    whole_theta: bool = False
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
_LATENT = Served(ropes=("default", "yarn"), ties=(False,))
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
        ropes=("default",), ties=(False,), takes_head_dim=False, whole_theta=True
    ),
    "qwen2_moe": Served(takes_head_dim=False, reads={"dual_chunk_attention_config": None}),
    "qwen3_moe": Served(reads={"dual_chunk_attention_config": None}),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
}  # fmt: skip

MODEL_PACKAGE = "mppo.rollout.sglang_models"
"""Classes that servers started by mppo take in place of SGLang's (``SGLANG_EXTERNAL_MODEL_PACKAGE``
of SGLang's documentation)."""
_LATENT_CLASS = "takes rms_norm_eps in MLA's inner norms, which have 1e-6"
OWN_CLASSES = {
    "gemma": "computes the exact GELU in place of hidden_act",
    "deepseek_v2": _LATENT_CLASS,
    "deepseek_v3": _LATENT_CLASS,
}
"""Families with a class in ``MODEL_PACKAGE``, and what SGLang's own class does instead."""

CAPPED_BACKEND = "flashinfer"
"""The attention backend on GPUs for models with soft-capped scores; on some, SGLang's default caps
nothing."""
_CAPPING = ("fa3", "flashinfer", "triton", "intel_amx")
"""Attention backends that read a layer's soft-cap."""
CPU_BACKEND = "torch_native"
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
"""Settings SGLang reads from config.json that transformers takes for granted and does not save."""


def sglang_settings(hf_config: Any) -> dict[str, Any]:
    """What SGLang is to read in place of config.json, for its model to be the actor's.

    Args:
        hf_config: transformers config of the model.

    Returns:
        Values by key of config.json; empty where it reads that as the actor does.
    """
    model_type = hf_config.model_type
    unstated = _UNSTATED.get(model_type, {})
    settings = {k: v for k, v in unstated.items() if getattr(hf_config, k, None) is None}
    if model_type == "deepseek_v2":
        settings |= {"n_group": 1, "topk_group": 1}  # the actor's router knows no groups
    if model_type == "gemma2":  # it wants both keys, of which transformers saves one
        activation = family_config(hf_config).activation
        settings |= {"hidden_act": activation, "hidden_activation": activation}
    if rope_parameters(hf_config)["rope_type"] != "default":
        settings["rope_parameters"] = _rope(hf_config)
    if getattr(hf_config, "quantization_config", None) is not None:
        settings["quantization_config"] = None  # weights are sent dequantised
    return settings


def _rope(hf_config: Any) -> dict[str, Any]:
    """Scaled rotary settings as the actor takes them, in SGLang's words."""
    stated = rope_parameters(hf_config)
    common = {key: stated[key] for key in ("rope_type", "rope_theta")}
    if hf_config.model_type in MLA_FAMILIES:
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
    """Where the rollout engine would compute another model than the actor.

    Args:
        recipe: the recipe.
        hf_config: transformers config of the actor's model.
        on_cpu: whether servers run on a CPU, whose attention knows no soft-cap.

    Raises:
        ValueError: the actor cannot represent the model either.
    """
    if recipe.rollout.name != "sglang":
        return
    actor, shape = family_config(hf_config), model_shape(hf_config)
    longest = recipe.data.max_prompt_length + recipe.data.max_response_length
    found = [
        *_layer_differences(hf_config, actor, shape),
        *_window_differences(hf_config, actor, longest),
        *_unknown_settings(hf_config, shape.model_type),
    ]
    for key, value, why, fix in found:
        said = f"config.json says {key} = {value!r}, and SGLang 0.5 {why}"
        fix = f"{fix}set rollout.name to local, whose model is the actor's"
        yield ConfigIssue("rollout.name", "sglang", said, fix)
    yield from _cap_issues(recipe, actor, on_cpu)
    yield from _delta_issues(recipe, on_cpu)


Difference = tuple[str, Any, str, str]
"""A key of config.json, its value, what SGLang does with it, another fix than the local engine."""


def _layer_differences(
    hf_config: Any, actor: FamilyConfig, shape: ModelShape
) -> Iterator[Difference]:
    """Activation, positions, widths, ties, the cap of the logits."""
    served, family = SERVED[shape.model_type], shape.model_type
    if actor.activation not in served.activations:
        key = "hidden_activation" if family == "gemma2" else "hidden_act"
        why = f"computes {' or '.join(served.activations)} in a {family}"
        yield key, actor.activation, why, ""
    rope = rope_parameters(hf_config)
    if rope["rope_type"] not in served.ropes:
        why = f"scales no positions of a {family}"
        yield "rope_parameters.rope_type", rope["rope_type"], why, ""
    if served.whole_theta and rope["rope_theta"] != int(rope["rope_theta"]):
        why = f"cuts it to {int(rope['rope_theta'])} in a {family}"
        yield "rope_parameters.rope_theta", rope["rope_theta"], why, ""
    if shape.tied not in served.ties:
        does = "projects with the embeddings" if shape.tied is False else "has a projection apart"
        yield "tie_word_embeddings", shape.tied, f"{does} in a {family}", ""
    width = shape.hidden // shape.heads
    if not served.takes_head_dim and shape.head_dim != width:
        yield "head_dim", shape.head_dim, f"gives the heads of a {family} width {width}", ""
    cap = getattr(hf_config, "final_logit_softcapping", None)
    if (cap or None) != (actor.final_logit_softcap or None):
        yield "final_logit_softcapping", cap, f"caps the logits, the actor's {family} does not", ""


def _window_differences(hf_config: Any, actor: FamilyConfig, longest: int) -> Iterator[Difference]:
    """Layers in which one slides a window that the sequences exceed, and the other does not."""
    ours = actor.layer_windows
    size = getattr(hf_config, "sliding_window", None)
    every_other = SERVED[actor.model_type].every_other_window
    theirs = [size if every_other and not i % 2 else None for i in range(len(ours))]
    other = [i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]]
    if other and size < longest:
        slides = "slides it in every other layer, from the first" if every_other else "ignores it"
        layers = f"the actor slides it in {sum(w is not None for w in ours)} of {len(ours)} layers"
        why = f"{slides} ({layers}), while prompt and response may have {longest} tokens"
        lower = f"keep data.max_prompt_length + data.max_response_length within {size}, or "
        yield "sliding_window", size, why, lower


def _unknown_settings(hf_config: Any, family: str) -> Iterator[Difference]:
    for key, neutral in SERVED[family].reads.items():
        value = getattr(hf_config, key, None)
        if value is not None and value != neutral:
            yield key, value, f"obeys it in a {family}, while the actor knows no such setting", ""


def _cap_issues(recipe: Recipe, actor: FamilyConfig, on_cpu: bool) -> Iterator[ConfigIssue]:
    """Attention backends that leave scores uncapped."""
    cap = actor.attn_logit_softcap
    given = _options(recipe)
    backends = {key: given[key] for key in _BACKEND_KEYS if given.get(key)}
    why = f"ignores config.json's attn_logit_softcapping = {cap}"
    capping = ", ".join(_CAPPING)
    for key, backend in backends.items():
        if cap and backend not in _CAPPING:
            fix = f"leave it out, or use one that caps scores: {capping}"
            yield ConfigIssue(f"rollout.server_args.{key}", backend, f"this backend {why}", fix)
    if cap and on_cpu and _BACKEND_KEYS[0] not in backends:
        said = f"SGLang's attention backend on a CPU, {CPU_BACKEND}, {why}"
        yield ConfigIssue(
            "rollout.name", "sglang", said, "run on GPUs, or set rollout.name to local"
        )


def _delta_issues(recipe: Recipe, on_cpu: bool) -> Iterator[ConfigIssue]:
    """Servers on a GPU that lose, while they sleep, the weights that changes are relative to."""
    given = _options(recipe)
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


def _options(recipe: Recipe) -> dict[str, Any]:
    """``rollout.server_args`` under SGLang's names of its options."""
    given = recipe.rollout.server_args
    return {name.lstrip("-").replace("-", "_"): value for name, value in given.items()}

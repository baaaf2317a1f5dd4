"""Activation functions by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from mppo.weights.shape import family_like, refuse


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation (``gelu_pytorch_tanh``)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "relu": F.relu,
}
_OTHER_KEYS = ("hidden_activation", "activation_function")


def activation_key(hf_config: Any) -> str:
    """The key of config.json that names the activation; by default ``hidden_act``."""
    named = (key for key in _OTHER_KEYS if getattr(hf_config, key, None))
    return next(named, "hidden_act")


def activation_name(hf_config: Any) -> str:
    """The name of the activation, a key of ``ACTIVATIONS``; ValueError if it is not supported.
    Gemma's ``hidden_act: gelu`` denotes the tanh form that its authors trained with and published
    so; later code ignores it unless ``hidden_activation`` is set."""
    key = activation_key(hf_config)
    name = getattr(hf_config, key, None)
    if family_like(hf_config) == "gemma" and key == "hidden_act" and name == "gelu":
        name = "gelu_pytorch_tanh"
    if name not in ACTIVATIONS:
        raise refuse(key, name, "not supported", f"use one of {', '.join(ACTIVATIONS)}")
    return name

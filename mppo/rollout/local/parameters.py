"""Load a stream of Hugging Face tensors into a transformers model in memory.

Transformers fuses the experts of a layer in memory (``mlp.experts.gate_up_proj``,
``mlp.experts.down_proj``); checkpoints, and so the weight stream, have one tensor per expert. Every
checkpoint name is mapped once to a view of a parameter.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mppo.models.transformers_model import WIDE_BUFFER
from mppo.safety.input_error import InputError
from mppo.weights.bucket import NamedTensors

_GATE_UP = ".experts.gate_up_proj"
_DOWN = ".experts.down_proj"
_MIXTRAL_FAMILIES = ("mixtral", "minimax", "minimax_m2")


def _expert_views(name: str, tensor: Tensor, model_type: str) -> dict[str, Tensor]:
    """Views of one fused expert parameter ``[E, out, in]``, by checkpoint name."""
    mixtral = model_type in _MIXTRAL_FAMILIES
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    prefix = name.rsplit(".", 1)[0]
    views = {}
    for expert, weight in enumerate(tensor.unbind(0)):
        if name.endswith(_DOWN):
            views[f"{prefix}.{expert}.{down}.weight"] = weight
        else:
            half_gate, half_up = weight.chunk(2)
            views[f"{prefix}.{expert}.{gate}.weight"] = half_gate
            views[f"{prefix}.{expert}.{up}.weight"] = half_up
    if mixtral:
        views = {n.replace(".mlp.", ".block_sparse_moe."): v for n, v in views.items()}
    return views


def checkpoint_views(model: PreTrainedModel) -> tuple[dict[str, Tensor], set[str]]:
    """A view of the model's memory for each checkpoint tensor, and the names that a stream may omit
    because they share memory with another name (a tied ``lm_head.weight``)."""
    model_type = model.config.model_type
    views: dict[str, Tensor] = {}
    aliases: set[str] = set()
    owners: set[tuple[int, int]] = set()
    for name, tensor in model.state_dict().items():
        if name.endswith((_GATE_UP, _DOWN)) and tensor.dim() == 3:
            views.update(_expert_views(name, tensor, model_type))
            continue
        if model_type in _MIXTRAL_FAMILIES:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        views[name] = tensor
        owner = (tensor.data_ptr(), tensor.numel())
        if owner in owners and tensor.numel():
            aliases.add(name)
        owners.add(owner)
    return views, aliases


class ParameterSink:
    """Copies a stream of checkpoint tensors into a model, rounded to ``dtype`` (the model's own may
    be wider)."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._views, self._aliases = checkpoint_views(model)
        self._dtype = dtype
        self._kept_wide = frozenset(n for n in self._views if n.endswith(WIDE_BUFFER))

    def fill(self, buckets: Iterable[NamedTensors]) -> None:
        """Copy all tensors of a stream. InputError if a name is unknown, a shape is wrong, or
        tensors are missing, raised after the stream is drained, because producing it is
        collective."""
        seen: set[str] = set()
        faults: list[str] = []
        with torch.no_grad():
            for bucket in buckets:
                for name, tensor in bucket:
                    fault = self._put(name, tensor)
                    if fault:
                        faults.append(fault)
                    seen.add(name)
        missing = sorted(self._views.keys() - seen - self._aliases)
        if missing:
            faults.append(f"{len(missing)} tensors are missing, the first of them {missing[:4]}")
        if faults:
            shown = "; ".join(faults[:4])
            raise InputError(f"weight stream does not fit the rollout model: {shown}")

    def _put(self, name: str, tensor: Tensor) -> str | None:
        view = self._views.get(name)
        if view is None:
            close = difflib.get_close_matches(name, self._views, n=1)
            return f"unknown tensor {name}" + (f" (nearest: {close[0]})" if close else "")
        if view.shape != tensor.shape:
            return f"{name} has shape {tuple(tensor.shape)}, model needs {tuple(view.shape)}"
        floating = tensor.is_floating_point() and name not in self._kept_wide
        view.copy_(tensor.to(self._dtype) if floating else tensor)
        return None

"""Loading of model stages from Megatron ``torch_dist`` checkpoints, in any layout.

Megatron's distributed checkpointing maps parameters to chunks of global tensors, so a checkpoint of
one layout loads in any other. The layout's groups must be active.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

from mppo.parallel.groups import LayoutGroups
from mppo.recipe.model_shape import model_shape
from mppo.safety.input_error import InputError
from mppo.weights.load_stages import load_hf_weights
from mppo.weights.model_folder import checkpoint_folder, is_megatron_checkpoint
from mppo.weights.torch_dist.contents import read_checkpoint
from mppo.weights.torch_dist.reader import model_prefix
from mppo.weights.torch_dist.sharded_load import load_sharded

VALUE_HEAD = "value_head.weight"


def load_megatron(path: str | Path, chunks: Sequence[Any], vocab: int) -> tuple[str, ...]:
    """Fill a role's parameters; collective over all ranks. Returns those left as initialised: a
    value head the checkpoint does not have.

    ``path`` is a checkpoint or its parent folder of iterations; ``vocab`` is without padding.

    Raises:
        InputError: no such checkpoint, it lacks parameters or parts of them, or its metadata would
            run code.
    """
    folder = checkpoint_folder(path)
    checkpoint = read_checkpoint(folder)
    prefix = model_prefix(checkpoint)
    state = {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}
    add_prefix_for_sharding(state, prefix)
    loaded, absent_keys = load_sharded(folder, checkpoint, state, vocab)
    lost = sorted(k.removeprefix(prefix) for k in absent_keys if "_extra_state" not in k)
    fresh = tuple(key for key in lost if key == VALUE_HEAD)
    if len(lost) > len(fresh):
        raise InputError(
            f"{folder}: lacks {len(lost)} parameters, such as {lost[0]}; use a complete checkpoint "
            "of this model"
        )
    for number, chunk in enumerate(chunks):
        absent, unexpected = chunk.load_state_dict(loaded[f"model{number}"], strict=False)
        names = [*absent, *unexpected]
        wrong = [n for n in names if not n.endswith("_extra_state") and n not in fresh]
        if wrong:
            raise InputError(
                f"{folder}: does not fit the model: {', '.join(wrong[:5])}; use a checkpoint of "
                "this model"
            )
    return fresh


def load_weights(
    path: str | Path, chunks: Sequence[Any], hf_config: Any, groups: LayoutGroups
) -> tuple[str, ...]:
    """Fill a role's parameters from a Hugging Face folder, of which every rank reads the slices it
    owns, or a checkpoint; collective. Returns as ``load_megatron``.

    Raises:
        InputError: a tensor is missing, unknown, or of another shape than config.json says.
    """
    if is_megatron_checkpoint(path):
        return load_megatron(path, chunks, model_shape(hf_config).vocab)
    return load_hf_weights(path, chunks, hf_config, groups.layout, groups.coordinates)

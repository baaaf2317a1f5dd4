"""Load a Hugging Face folder into built stages: each rank reads only its own shards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mppo.parallel.layout import Coordinates, Layout
from mppo.recipe.model_shape import ModelShape, model_shape
from mppo.safety.input_error import InputError
from mppo.weights.blocks import ZERO
from mppo.weights.hf.input_folder import HFFolder
from mppo.weights.names import hf_names
from mppo.weights.slots import Slot, assert_partition, find_slots
from mppo.weights.table import parameter_table


def load_hf_weights(
    folder: str | Path | HFFolder,
    chunks: Sequence[Any],
    hf_config: Any,
    layout: Layout,
    coordinates: Coordinates,
) -> tuple[str, ...]:
    """Load this rank's chunks from a Hugging Face folder, without communication. Return the
    parameters that keep their initial values: a value head that the folder lacks.

    Raises:
        InputError: a tensor is missing or unknown, or its shape differs from config.json.
    """
    source = folder if isinstance(folder, HFFolder) else HFFolder(folder)
    shape = model_shape(hf_config)
    slots = find_slots(chunks, parameter_table(shape), layout, coordinates)
    assert_partition(chunks, slots)
    known_extras(source, shape)
    fresh = []
    with torch.no_grad():
        for slot in slots:
            if slot.entry.row.optional and slot.entry.hf[0] not in source.tensors:
                fresh.append(slot.entry.name)
            else:
                _fill(slot, source, shape.kv_heads)
    return tuple(fresh)


def _fill(slot: Slot, source: HFFolder, groups: int) -> None:
    dim, offset = slot.entry.cut_dim, 0
    for block in slot.blocks(groups):
        part = slot.tensor.narrow(dim, offset, block.length)
        if block.source == ZERO:
            part.zero_()
        else:
            source.read_into(part, slot.entry.hf[block.source], dim, block.start)
        offset += block.length


def known_extras(source: HFFolder, shape: ModelShape) -> tuple[str, ...]:
    """Check the folder's tensors against the table, and return the known ones outside it, such as
    those of multi-token-prediction layers, or masks and rotary buffers of old checkpoints.

    Raises:
        InputError: a tensor is neither in the table nor a known extra, is missing in the folder,
            has another shape, or does not hold floats.
    """
    table = parameter_table(shape)
    expected = table.hf_shapes()
    extras, unknown = [], []
    (score,), (needed,) = table.value_entry().hf, table.value_entry().row.shapes
    if score in source.tensors and source.shape(score) != needed:
        raise InputError(
            f"{source.path}: {score} has shape {list(source.shape(score))}, but a value head has "
            f"{list(needed)}; use a reward model with one label (num_labels=1), or for a critic "
            "with a histogram of values the critic.value_loss and critic.hl_gauss.bins it had"
        )
    projection = f"{hf_names(shape.model_type).head}.weight"
    for name in source.tensors:
        if name in expected:
            continue
        known = name in (projection, score) or _is_buffer(name, shape)
        known = known or is_extra_layer(name, shape)
        (extras if known else unknown).append(name)
    if unknown:
        raise InputError(
            f"{source.path}: {len(unknown)} tensors that a {shape.model_type} of "
            f"{shape.num_layers} layers does not have, such as {sorted(unknown)[0]}; config.json "
            "and the weights do not belong together"
        )
    lost = [name for name in expected if name not in source.tensors and name != projection]
    if lost:
        raise InputError(
            f"{source.path}: {len(lost)} tensors are missing, such as {sorted(lost)[0]}"
        )
    for name, shape_expected in expected.items():
        if name in source.tensors:
            _check_tensor(source, name, shape_expected)
    return tuple(extras)


def _check_tensor(source: HFFolder, name: str, expected: tuple[int, ...]) -> None:
    stored = source.tensors[name]
    if stored.shape != expected:
        raise InputError(
            f"{source.path}: {name} has shape {list(stored.shape)}, config.json says "
            f"{list(expected)}; they do not belong together"
        )
    if not stored.dtype.is_floating_point:
        raise InputError(
            f"{source.path}: {name} is stored as {str(stored.dtype).removeprefix('torch.')}, but "
            "weights must be floats; use the unquantised model"
        )
    source.scales(name)  # raises for 8-bit floats without scales


def _is_buffer(name: str, shape: ModelShape) -> bool:
    """Return whether a tensor is one that old checkpoints hold although the model computes it."""
    names = hf_names(shape.model_type)
    start, end = (re.escape(part) for part in names.layer.split("{l}"))
    return any(re.fullmatch(rf"{start}\d+{end}{re.escape(own)}", name) for own in names.buffers)


def is_extra_layer(name: str, shape: ModelShape) -> bool:
    """Return whether a tensor belongs to a multi-token-prediction layer after the decoder."""
    if found := re.match(r"^model\.mtp_layers\.(\d+)\.", name):  # MiMo
        return int(found[1]) < shape.extra_layers
    found = re.match(r"^model\.layers\.(\d+)\.", name)
    return bool(found) and 0 <= int(found[1]) - shape.num_layers < shape.extra_layers

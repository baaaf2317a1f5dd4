"""Loading of Megatron sharded state from a ``torch_dist`` checkpoint, without Python's pickle.

``megatron.core.dist_checkpointing.load`` unpickles ``.metadata``, ``common.pt`` and all objects
other than tensors, but it accepts other readers as arguments. The two readers here return what
``read_checkpoint`` has checked, and the bytes of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import LoadCommonStrategy, LoadShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch import Tensor

from mppo.safety.input_error import InputError
from mppo.safety.input_files import open_file, read_json
from mppo.weights.hf.safetensors_file import StoredTensor, byte_view, read_at
from mppo.weights.torch_dist.contents import Chunk, GlobalTensor, check_complete, needed_shape
from mppo.weights.torch_dist.format import BACKEND, locate


def load_sharded(
    folder: Path, checkpoint: Mapping[str, GlobalTensor], state: dict[str, Any], vocab: int
) -> tuple[dict[str, Any], set[str]]:
    """Fill the tensors of a sharded state; return it, and the keys the checkpoint lacks.
    Collective.

    Objects of the state are left out: they are pickles, and no module here reads them. ``vocab`` is
    without padding.

    Raises:
        InputError: ``metadata.json`` is not as Megatron writes it, a chunk is damaged, or a tensor
            has another shape or does not hold every number of the model's.
    """
    _check_backend(folder)
    tensors, _ = extract_sharded_tensors_and_factories(state)
    # the third result, "unexpected" for Megatron: keys of the state that the checkpoint lacks
    result = dist_checkpointing.load(
        tensors,
        str(folder),
        sharded_strategy=_Tensors(folder, checkpoint, vocab),
        common_strategy=_NoCommonState(),
        strict=StrictHandling.RETURN_ALL,
    )
    # RETURN_ALL makes it a triple; the annotation covers the other settings too
    loaded, _, absent = cast("tuple[dict[str, Any], set[str], set[str]]", result)
    return loaded, absent


def _check_backend(folder: Path) -> None:
    """Check ``metadata.json``, which Megatron reads without checks."""
    file = folder / "metadata.json"
    content = read_json(file)
    if content.get("sharded_backend") != "torch_dist" or not content.keys() <= BACKEND.keys():
        raise InputError(f"{file}: not of a torch_dist checkpoint; save it as one")


class _NoCommonState(LoadCommonStrategy):
    """Reader of ``common.pt`` that returns nothing, because nothing in it is needed."""

    def load_common(self, checkpoint_dir: Any) -> dict[str, Any]:
        return {}

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
        return sharded_objects_state_dict

    def check_backend_compatibility(self, loaded_backend: Any) -> None: ...

    def check_version_compatibility(self, loaded_version: Any) -> None: ...


class _Tensors(LoadShardedStrategy):
    def __init__(self, folder: Path, checkpoint: Mapping[str, GlobalTensor], vocab: int) -> None:
        self._folder, self._vocab = folder, vocab
        self._complete: set[str] = set()
        self._stored = {key: _Boxes(tensor) for key, tensor in checkpoint.items()}
        self._located: dict[Chunk, StoredTensor] = {}

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        return dict_list_map_outplace(self._fill, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: Any) -> dict[str, ShardedTensor]:
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(boxes.tensor.shape, dtype=boxes.tensor.dtype, device="meta")
            ).without_data()
            for key, boxes in self._stored.items()
        }

    def load_sharded_metadata(self, checkpoint_dir: Any) -> dict[str, ShardedTensor]:
        return self.load_tensors_metadata(checkpoint_dir)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True  # there are none: load_sharded leaves them out

    def check_backend_compatibility(self, loaded_backend: Any) -> None: ...

    def check_version_compatibility(self, loaded_version: Any) -> None: ...

    def _fill(self, shard: ShardedTensor) -> Tensor:
        """Fill and return the shard's tensor; padding that the checkpoint lacks is zero."""
        boxes = self._stored[shard.key]
        self._check(shard, boxes.tensor)
        if shard.data is None:
            shard.init_data("cpu")
        data = cast("Tensor", shard.data).detach()  # init_data has set it
        target = data.view((1,) * shard.prepend_axis_num + tuple(shard.local_shape))
        if shard.allow_shape_mismatch:
            target.zero_()
        for chunk in boxes.overlapping(shard.global_offset, target.shape):
            if chunk not in self._located:
                self._located[chunk] = locate(chunk)
            _copy(chunk, self._located[chunk], shard.global_offset, target)
        return data

    def _check(self, shard: ShardedTensor, stored: GlobalTensor) -> None:
        """Check shape and completeness of a stored tensor; once, for all shards of it."""
        if shard.key in self._complete:
            return
        name, shape = f"{self._folder}: {shard.key}", tuple(shard.global_shape)
        # Megatron allows another shape for what is padded along the vocabulary
        vocab = self._vocab if shard.allow_shape_mismatch else None
        needed = needed_shape(stored.shape, shape, vocab)
        if needed is None:
            model = list(shape) if vocab is None else f"{[vocab, *shape[1:]]} without padding"
            raise InputError(
                f"{name} has shape {list(stored.shape)}, but the model has {model}; use a "
                "checkpoint of this model"
            )
        check_complete(name, stored, needed)
        self._complete.add(shard.key)


class _Boxes:
    def __init__(self, tensor: GlobalTensor) -> None:
        self.tensor = tensor

    @cached_property
    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        begin = np.array([chunk.offsets for chunk in self.tensor.chunks], dtype=np.int64)
        sizes = np.array([chunk.sizes for chunk in self.tensor.chunks], dtype=np.int64)
        return begin, begin + sizes

    def overlapping(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Chunk]:
        if not self.tensor.chunks or not math.prod(sizes):
            return []
        begin, end = self._bounds
        last = np.add(offsets, sizes, dtype=np.int64)
        hit = ((begin < last) & (end > np.array(offsets, dtype=np.int64))).all(axis=1)
        return [self.tensor.chunks[number] for number in np.flatnonzero(hit)]


def _copy(chunk: Chunk, stored: StoredTensor, offsets: tuple[int, ...], target: Tensor) -> None:
    shared = [
        (max(there, here), min(there + size, here + length))
        for there, size, here, length in zip(chunk.offsets, chunk.sizes, offsets, target.shape)
    ]
    for dim, (begin, end) in enumerate(shared):
        target = target.narrow(dim, begin - offsets[dim], end - begin)
    if not shared:
        target.copy_(_read(stored, 0, 1))
        return
    (first, last), *rest = shared
    source = _read(stored, first - chunk.offsets[0], last - first)
    for dim, (begin, end) in enumerate(rest, 1):
        source = source.narrow(dim, begin - chunk.offsets[dim], end - begin)
    target.copy_(source)


def _read(stored: StoredTensor, first: int, count: int) -> Tensor:
    shape = (count, *stored.shape[1:]) if stored.shape else ()
    rows = torch.empty(shape, dtype=stored.dtype)
    offset = stored.offset + first * (rows.nbytes // max(count, 1))
    with open_file(stored.file) as stream:
        read_at(stream.fileno(), byte_view(rows), offset, stored.file)
    return rows

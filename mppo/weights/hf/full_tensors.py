"""Full tensors of a model under Hugging Face names, from a folder or a Megatron checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mppo.weights.hf.folder import HFFolder
from mppo.weights.hf.safetensors_file import StoredTensor
from mppo.weights.hf.transfer import Copier, CopyTask
from mppo.weights.model_folder import checkpoint_folder, is_megatron_checkpoint
from mppo.weights.shape import model_shape
from mppo.weights.table import parameter_table
from mppo.weights.torch_dist.contents import read_checkpoint
from mppo.weights.torch_dist.reader import CheckpointReader, value_bins


def full_tensors(path: str | Path, hf_config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a Hugging Face folder or Megatron checkpoint on the CPU, under its
    Hugging Face name, in the stored dtype (8-bit floats as float32).

    Raises:
        ValueError: the checkpoint is incomplete, or of another model.
    """
    if not is_megatron_checkpoint(path):
        source = HFFolder(path)
        yield from ((name, source.read(name)) for name in sorted(source.tensors))
        return
    checkpoint = read_checkpoint(checkpoint_folder(path))
    shape = replace(model_shape(hf_config), value_bins=value_bins(checkpoint))
    reader, copier = CheckpointReader(checkpoint, parameter_table(shape)), Copier()
    for entry in reader.entries():
        for number, (name, shape) in enumerate(zip(entry.hf, entry.row.shapes, strict=True)):
            tensor = torch.empty(shape, dtype=reader.dtype(entry))
            bytes_ = tensor.view(-1).view(torch.uint8).numpy()
            target = StoredTensor(Path(), 0, tensor.dtype, shape)
            done = 0
            for _, window in copier.windows(
                CopyTask(name, target, reader.stretches(entry, number))
            ):
                bytes_[done : done + len(window)] = window
                done += len(window)
            yield name, tensor
    copier.close()

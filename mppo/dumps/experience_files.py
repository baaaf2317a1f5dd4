"""An experience in safetensors files: each rank writes the sequences it holds, any rank reads any.

``rank_R.safetensors`` holds the tensors of an ``Experience`` under dotted names:
``batch.tokens_T``, ``old.values_T``, ``advantages_T`` and so on. Tensors ``[B]`` are those of all
sequences, the same in every file; ``batch.held_H`` says which sequences the tensors ``[T]`` are of.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mppo.algos.token_axis import cumulative
from mppo.batch.batch import Batch
from mppo.batch.outputs import Experience, Outputs
from mppo.safety.disk import replace_bytes
from mppo.safety.input_error import InputError
from mppo.safety.input_files import parse_json
from mppo.weights.hf.safetensors_file import read_header

_HELD, _ENDS = "batch.held_H", "batch.cu_seqlens"
_WHOLE = (
    "tokens_T", "cu_seqlens", "routed_experts_T", "held_H", "lengths_B", "response_B", "end_B",
    "inserted_B", "home_B", "digest_B", "group_B", "episode_B",
    "weight_version_T",
)  # fmt: skip
"""Tensors of whole numbers; all others hold real numbers or truth values."""


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.safetensors"


def named_tensors(experience: Experience) -> dict[str, Tensor]:
    """Every tensor of an experience by its dotted name."""
    old, batch = experience.old, experience.old.batch
    parts = {"batch.": batch, "old.": old, "": experience}
    return {
        f"{prefix}{f.name}": getattr(part, f.name).contiguous()
        for prefix, part in parts.items()
        for f in fields(part)
        if isinstance(getattr(part, f.name), Tensor)
    }


def write_share(
    folder: Path, rank: int, experience: Experience, leave_out: Collection[str] = ()
) -> None:
    tensors = {k: v.clone() for k, v in named_tensors(experience).items() if k not in leave_out}
    batch, old = experience.old.batch, experience.old
    layers = batch.expert_layers
    about = {"layers": None if layers is None else list(layers), "actor": old.has_actor_logprobs}
    # save_file's own errors are no OSError
    replace_bytes(rank_file(folder, rank), save(tensors, {"experience": json.dumps(about)}))


def read_batch_tensor(folder: Path, name: str) -> Tensor:
    """A tensor ``[B]`` of the batch, such as ``lengths_B``; ValueError, KeyError or OSError if the
    folder has no valid file of the first rank."""
    with _opened(rank_file(folder, 0)) as file:
        return file.get_tensor(f"batch.{name}")


def read_experience(folder: Path, ranks: int, held: Sequence[int] | None = None) -> Experience:
    """Read sequences (``held``: indices, ascending; None: all) that one or several ranks have
    written; ValueError, KeyError, TypeError or OSError if a file is missing or damaged, or a
    sequence is in no file."""
    try:
        return _read(folder, ranks, held)
    except (SafetensorError, RuntimeError, IndexError) as error:  # tensors that do not fit together
        raise InputError(f"{folder}: {error}") from error


def read_one_file(path: Path) -> Experience:
    """Read an experience of all sequences, as an earlier version wrote it; ValueError, KeyError,
    TypeError or OSError if the file does not hold one."""
    try:
        with _opened(path) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        ends = tensors[_ENDS]
        if len(ends) < 2 or ends[0] != 0 or ends.dtype != torch.int64 or (ends.diff() < 0).any():
            raise InputError(f"{path}: {_ENDS} does not divide the tokens into sequences")
        tokens, sequences = int(ends[-1]), len(ends) - 1
        for name, tensor in tensors.items():
            length = {"T": tokens, "B": sequences}.get(name[-1])
            if length not in (None, len(tensor)):
                raise InputError(f"{path}: {name} has {len(tensor)} rows, not {length}")
        return _experience(tensors, {"layers": None, "actor": True})
    except (SafetensorError, RuntimeError, IndexError) as error:
        raise InputError(f"{path}: {error}") from error


def _read(folder: Path, ranks: int, held: Sequence[int] | None) -> Experience:
    with _opened(rank_file(folder, 0)) as file:
        about = parse_json((file.metadata() or {})["experience"])
        names = [name for name in file.keys() if name.endswith("_B")]  # noqa: SIM118
        shared = {name: file.get_tensor(name) for name in names}
    if held is None:
        held = range(len(shared["batch.lengths_B"]))
    homes = shared["batch.home_B"].tolist()
    found: dict[str, dict[int, Tensor]] = {}
    for rank in sorted({max(homes[index], 0) for index in held}) or [0]:
        if rank >= ranks:
            raise InputError(f"{folder}: rank {rank} of {ranks} holds a sequence")
        with _opened(rank_file(folder, rank)) as file:
            _read_held(file, set(held), found)
    missing = set(held) - found.get("batch.tokens_T", {}).keys()
    if missing:
        raise InputError(f"{folder}: no file holds sequence {min(missing)}")
    tensors = dict(shared)
    lengths = shared["batch.lengths_B"].tolist()
    for name, parts in found.items():
        wrong = [index for index in held if len(parts[index]) != lengths[index]]
        if wrong:
            index = wrong[0]
            count = f"{len(parts[index])} of its {lengths[index]} tokens"
            raise InputError(f"{folder}: {name} of sequence {index} has {count}")
        tensors[name] = torch.cat([parts[i] for i in held]) if held else _nothing(folder, name)
    indices = torch.tensor(list(held), dtype=torch.int64)
    tensors[_HELD], tensors[_ENDS] = indices, cumulative(tensors["batch.lengths_B"][indices])
    tensors["batch.home_B"] = torch.full_like(tensors["batch.home_B"], -1)  # every rank
    return _experience(tensors, about)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file, after a check of its header, which another library reads, and of the types;
    InputError for a tensor whose name does not allow its type."""
    read_header(path)
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            kind, shape = file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()
            if (kind[0] in "IU") != (name.rpartition(".")[2] in _WHOLE) or not shape:
                raise InputError(f"{path}: {name} cannot be of type {kind} and shape {shape}")
        yield file


def _read_held(file: Any, wanted: set[int], found: dict[str, dict[int, Tensor]]) -> None:
    held, ends = file.get_tensor(_HELD).tolist(), file.get_tensor(_ENDS).tolist()
    names = list(file.keys())
    for name in (name for name in names if name.endswith("_T")):
        of_name, stored = found.setdefault(name, {}), None
        for place, index in enumerate(held):
            if index in wanted and index not in of_name:
                stored = file.get_slice(name) if stored is None else stored
                of_name[index] = stored[ends[place] : ends[place + 1]]


def _nothing(folder: Path, name: str) -> Tensor:
    with _opened(rank_file(folder, 0)) as file:
        return file.get_slice(name)[0:0]


def _experience(tensors: dict[str, Tensor], about: dict[str, Any]) -> Experience:
    def part(kind: type, prefix: str) -> dict[str, Any]:
        names = {f.name: f"{prefix}{f.name}" for f in fields(kind)}
        return {name: tensors[key] for name, key in names.items() if key in tensors}

    layers = about["layers"]
    layers = None if layers is None else tuple(layers)
    batch = Batch(**part(Batch, "batch."), expert_layers=layers)
    old = Outputs(batch=batch, has_actor_logprobs=bool(about["actor"]), **part(Outputs, "old."))
    return Experience(old=old, **part(Experience, ""))

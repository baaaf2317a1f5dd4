"""The random state of one rank: Python, NumPy, torch, the device, and Megatron's trackers."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from mppo.parallel import device
from mppo.parallel.groups import LayoutGroups
from mppo.safety.input_error import InputError
from mppo.safety.input_files import parse_json
from mppo.weights.hf.safetensors_file import read_header


def file_name(rank: int) -> str:
    return f"random/rank_{rank:05d}.safetensors"


def random_state(layouts: Mapping[str, LayoutGroups]) -> bytes:
    """Serialise this rank's random state, with that of Megatron's trackers in the groups by role,
    as a safetensors file."""
    # the legacy form; numpy's annotation has its dict too
    state = cast("tuple[str, np.ndarray, int, int, float]", np.random.get_state())
    numpy_kind, numpy_keys, *numpy_rest = state
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(numpy_keys.copy())}
    if (state := device.device_random_state()) is not None:
        tensors["device"] = state
    for role, groups in layouts.items():
        tensors |= {f"{role}/{name}": s for name, s in groups.random_states().items()}
    header = {
        "python": json.dumps(random.getstate()),
        "numpy": json.dumps([numpy_kind, *numpy_rest]),
    }
    return save({name: t.clone() for name, t in tensors.items()}, metadata=header)


def load_random_state(folder: Path, rank: int, layouts: Mapping[str, LayoutGroups]) -> None:
    """Restore the state that the same rank of the same layouts saved; ValueError, KeyError or
    TypeError if the file does not hold one."""
    read_header(folder / file_name(rank))
    with safe_open(folder / file_name(rank), framework="pt") as file:
        header = file.metadata()
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if tensors["torch"].shape != torch.get_rng_state().shape:
        raise InputError(f"{folder / file_name(rank)}: 'torch' is not a state of torch's generator")
    version, words, gauss = parse_json(header["python"])
    random.setstate((version, tuple(words), gauss))
    numpy_kind, *numpy_rest = parse_json(header["numpy"])
    np.random.set_state((numpy_kind, tensors["numpy"].numpy(), *numpy_rest))
    torch.set_rng_state(tensors["torch"])
    if "device" in tensors:
        device.set_random_state(tensors["device"])
    for role, groups in layouts.items():
        prefix = f"{role}/"
        mine = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        groups.set_random_states(mine)

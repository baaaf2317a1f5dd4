"""The batch of a non-finite step, for ``mppo-replay``: written by the loop, read by the program."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor

from mppo.batch import Batch, Experience, ModelOutputs
from mppo.safety.disk import replace_text, set_aside, write_bytes
from mppo.safety.input_files import read_json
from mppo.trainer.sharing.shares import gather_experience
from mppo.weights.hf.safetensors_file import read_header

CASE, TENSORS, MODELS = "case.json", "experience.safetensors", "models"


@dataclass(frozen=True)
class ReplayCase:
    """A mini-batch and its origin.

    Args:
        step: PPO step.
        mini_batch: indices of the sequences whose loss or gradient was not finite.
        model: Hugging Face folder the roles were built from.
        recipe: the run's, as plain values without secrets.
    """

    step: int
    mini_batch: tuple[int, ...]
    model: str
    recipe: dict[str, Any]


def keep_case(folder: Path, case: ReplayCase, experience: Experience) -> None:
    """Write the case on the first rank; an earlier case of the same step is renamed.

    Args:
        folder: folder to write.
        case: the mini-batch.
        experience: of the step, shared out. Collective.
    """
    complete = gather_experience(experience)
    if complete is not None:
        if folder.exists():
            set_aside(folder)
        folder.mkdir(parents=True)
        tensors = {name: tensor.clone() for name, tensor in named_tensors(complete).items()}
        write_bytes(folder / TENSORS, save(tensors))
        replace_text(folder / CASE, json.dumps(asdict(case), indent=1) + "\n")


def load_case(folder: Path) -> tuple[ReplayCase, Experience]:
    """Load what ``keep_case`` wrote.

    Raises:
        ValueError, KeyError, TypeError, OSError: the folder does not hold a valid case.
    """
    case = ReplayCase(**read_json(folder / CASE, nan=True))
    read_header(folder / TENSORS)
    tensors = load_file(folder / TENSORS)
    parts: dict[str, Any] = {
        f.name: tensors[f"batch.{f.name}"] for f in fields(Batch) if f"batch.{f.name}" in tensors
    }
    batch = Batch(**parts)
    named = [f.name for f in fields(ModelOutputs) if f"old.{f.name}" in tensors]
    outputs: dict[str, Any] = {name: tensors[f"old.{name}"] for name in named}
    old = ModelOutputs(batch=batch, **outputs)
    named = [f.name for f in fields(Experience) if f.name != "old"]
    experience = Experience(old=old, **{name: tensors[name] for name in named})
    return case, experience


def named_tensors(experience: Experience) -> dict[str, Tensor]:
    """Return every tensor of an experience by its dotted name."""
    old, batch = experience.old, experience.old.batch
    parts = {"batch.": batch, "old.": old, "": experience}
    return {
        f"{prefix}{f.name}": getattr(part, f.name).contiguous()
        for prefix, part in parts.items()
        for f in fields(part)
        if isinstance(getattr(part, f.name), Tensor)
    }

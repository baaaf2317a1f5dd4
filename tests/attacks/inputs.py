"""Inputs that several tables share: tiny models, and paths that are not regular files."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Prepare = Callable[[Path], None]

CONFIG: dict[str, Any] = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 8,
    "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 16, "max_position_embeddings": 64,
}  # fmt: skip
DEEP = "[" * 500 + "]" * 500
LONG = "9" * 5000
TASK = ("data.task=arithmetic", "data.val_size=4", "data.train_size=64")
MODEL = ("model.path=model", *TASK)
RUN = (
    "model.path=builtin:tiny", *TASK, "data.max_prompt_length=16", "data.max_response_length=2",
    "data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "algorithm.adv_estimator=grpo",
    "rollout.n=2", "trainer.save_freq=1", "trainer.val_before_train=false",
    "trainer.export_hf=false", "trainer.logger=[jsonl]",
)  # fmt: skip


def train(*arguments: str) -> int:
    """The exit code of the trainer with a command line."""
    from mppo.train import main

    return main(arguments)


def steps(count: int) -> tuple[str, ...]:
    """The option that ends a run after some steps."""
    return (f"trainer.total_training_steps={count}",)


def evaluate(*arguments: str) -> int:
    """The exit code of the evaluation of a recipe without keys."""
    from mppo.evaluate import main

    Path("recipe.yaml").touch()
    return main(["--config", "recipe.yaml", *arguments])


def convert(*arguments: str) -> int:
    """The exit code of mppo-convert with a command line."""
    from checkpoints_convert.__main__ import main

    return main(list(arguments))


def dry_run_of_the_model(folder: Path) -> int:
    """``--dry-run`` of a recipe whose model is the folder ``model``."""
    return train("--dry-run", *MODEL)


def to_megatron(folder: Path) -> int:
    """Convert the folder ``model``."""
    return convert("hf-to-megatron", "--hf", "model", "--megatron", "out", "--no-tokenizer")


def config(**changes: Any) -> Prepare:
    """A folder ``model`` with a config.json only."""

    def prepare(folder: Path) -> None:
        write(folder / "model/config.json", json.dumps({**CONFIG, **changes}))

    return prepare


def model(spoil: Callable[[Path], None] | None = None, **changes: Any) -> Prepare:
    """A folder ``model`` with weights, then changed."""

    def prepare(folder: Path) -> None:
        import torch
        from safetensors.torch import save_file
        from transformers import AutoConfig

        from mppo.recipe.model_shape import model_shape
        from mppo.weights.table import parameter_table

        config(**changes)(folder)
        where = folder / "model"
        shapes = parameter_table(model_shape(AutoConfig.from_pretrained(where))).hf_shapes()
        save_file(
            {name: torch.ones(shape) for name, shape in shapes.items()}, where / "model.safetensors"
        )
        if spoil is not None:
            spoil(where)

    return prepare


def with_tokenizer(spoil: Callable[[Path], None] | None = None) -> Prepare:
    """A folder ``model`` of an embedded model with its tokenizer, then changed."""

    def prepare(folder: Path) -> None:
        from mppo.hub.builtin import resolve_model

        shutil.copytree(resolve_model("builtin:tiny"), folder / "model")
        if spoil is not None:
            spoil(folder / "model")

    return prepare


def weights(header: Any, data: bytes = bytes(64), length: int | None = None) -> Prepare:
    """A folder ``model`` whose weights have this header (JSON text, or an object to encode)."""

    def prepare(folder: Path) -> None:
        config()(folder)
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        prefix = struct.pack("<Q", len(text) if length is None else length)
        (folder / "model/model.safetensors").write_bytes(prefix + text + data)

    return prepare


def entry(first: int = 0, last: int = 16, shape: Any = (4,), dtype: Any = "F32") -> dict[str, Any]:
    """A header's entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def index(place: Any) -> Callable[[Path], None]:
    """Set the file of a tensor in the model's index."""

    def spoil(where: Path) -> None:
        content = {"weight_map": {"model.norm.weight": place}}
        write(where / "model.safetensors.index.json", json.dumps(content))

    return spoil


def write(file: Path, content: str | bytes) -> None:
    """Write a file; its folder is created if missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


def instead(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Replace a file by something that is not a regular file."""

    def spoil(folder: Path) -> None:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        make(file)

    return spoil


def fifo(file: Path) -> None:
    """A FIFO: opening it waits for a writer."""
    os.mkfifo(file)


def a_socket(file: Path) -> None:
    """A socket in the file system."""
    os.chdir(file.parent)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(file.name)


def zeros(file: Path) -> None:
    """A device without an end."""
    file.symlink_to("/dev/zero")


def sparse(file: Path) -> None:
    """A sparse file of a terabyte."""
    with file.open("wb") as stream:
        stream.truncate(1 << 40)


def link(target: str) -> Callable[[Path], None]:
    """A link relative to its folder."""
    return lambda file: file.symlink_to(target)


def folder_there(file: Path) -> None:
    """A folder."""
    file.mkdir()

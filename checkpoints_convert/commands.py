"""The commands that convert in both directions and inspect."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
import yaml

from checkpoints_convert.common_state import common_state
from checkpoints_convert.job import Ranks, clear_journal, fingerprint_of, run_plan
from checkpoints_convert.run_config import RUN_CONFIG, run_config
from mppo.hub.builtin import read_model_config
from mppo.recipe.model_shape import ModelShape, model_shape
from mppo.safety.input_files import read_json
from mppo.weights.hf.input_folder import HFFolder
from mppo.weights.hf.output_folder import (
    check_free,
    companion_files,
    copy_companions,
    partial_path,
    publish,
    write_index,
)
from mppo.weights.model_folder import (
    COMPANIONS,
    LATEST,
    RELEASE,
    checkpoint_folder,
    companion_folder,
    weights_folder,
)
from mppo.weights.torch_dist.contents import read_checkpoint
from mppo.weights.torch_dist.conversion import EXTRA_FILE, MegatronIndex, plan_hf, plan_megatron
from mppo.weights.torch_dist.format import write_metadata as write_checkpoint_index
from mppo.weights.torch_dist.reader import value_bins

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json",
              "tiktoken.model")  # fmt: skip


def hf_to_megatron(
    hf: Path,
    megatron: Path,
    ranks: Ranks,
    dtype: torch.dtype | None = None,
    keep_extra: bool = False,
    tokenizer: bool = True,
) -> str:
    """Convert a Hugging Face folder into a ``torch_dist`` checkpoint, which must not exist; return
    a summary. Collective.

    Args:
        dtype: cast weights to this; None: as stored.
        keep_extra: store multi-token-prediction layers separately, to restore them on the way back.
        tokenizer: refuse a folder without a tokenizer.

    Raises:
        ValueError: the input is invalid, or the output exists.
        OSError: the disk is full, or failed.
    """
    started = time.monotonic()
    megatron = megatron.absolute()
    check_free(megatron)
    shape = read_shape(hf)
    if tokenizer and not any((hf / name).exists() for name in TOKENIZERS):
        raise ValueError(
            f"{hf}: has no tokenizer ({', '.join(TOKENIZERS)}); add one, or pass --no-tokenizer"
        )
    companion_files(hf)
    source = HFFolder(hf)
    building = partial_path(megatron)
    plan, index = plan_megatron(source, shape, building / RELEASE, dtype, keep_extra, ranks)
    sizes = {file.name: size for file, (_, size) in plan.files.items()}
    fingerprint = fingerprint_of(_state(hf), shape, dtype, keep_extra, sizes)
    run_plan(plan, building, ranks, fingerprint)
    if ranks.rank == 0:
        _describe_model(hf, building / RELEASE, index, dtype)
        (building / LATEST).write_text(RELEASE)
        (building / COMPANIONS).mkdir(exist_ok=True)
        copy_companions(hf, building / COMPANIONS, dtype or _plain_dtype(hf))
        clear_journal(building)
        publish(megatron)
    ranks.barrier()
    return _report(megatron, plan.count, plan.total_bytes, started, plan.extras)


def megatron_to_hf(
    megatron: Path,
    hf: Path,
    ranks: Ranks,
    config: Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> str:
    """Convert a ``torch_dist`` checkpoint into a Hugging Face folder, which must not exist; return
    a summary. Collective. Raises as ``hf_to_megatron``.

    Args:
        megatron: the checkpoint, or the folder of iterations above it.
        config: folder with config.json and tokenizer; None: the one stored with the checkpoint.
        dtype: cast weights to this; None: as stored.
    """
    started = time.monotonic()
    hf = hf.absolute()
    check_free(hf)
    folder, companions = find_checkpoint(megatron, config)
    shape = read_shape(companions)
    checkpoint = read_checkpoint(folder)
    shape = replace(shape, value_bins=value_bins(checkpoint))
    companion_files(companions)
    building = partial_path(hf)
    extra = folder / EXTRA_FILE
    plan, places = plan_hf(
        checkpoint, shape, building, dtype, extra if extra.exists() else None, ranks,
        max_shard_bytes,
    )  # fmt: skip
    stamp = (folder / ".metadata").stat().st_mtime_ns
    fingerprint = fingerprint_of(folder, stamp, shape, dtype, max_shard_bytes, plan.count)
    run_plan(plan, building, ranks, fingerprint)
    if ranks.rank == 0:
        weights = next(p.dtype for p in places.values() if len(p.shape) == 2)
        copy_companions(companions, building, weights, shape.value_bins)
        write_index(building, places)
        clear_journal(building)
        publish(hf)
    ranks.barrier()
    return _report(hf, plan.count, plan.total_bytes, started, ())


def inspect(path: Path) -> str:
    """List the contents of a Hugging Face folder or a Megatron checkpoint, as text."""
    if (path / "config.json").exists():
        source = HFFolder(path)
        tensors = {name: (t.dtype, t.shape) for name, t in source.tensors.items()}
        config = read_json(path / "config.json")
        lines = [f"Hugging Face folder {path}", f"family      {config.get('model_type')}"]
    else:
        folder = checkpoint_folder(path)
        checkpoint = read_checkpoint(folder)
        tensors = {key: (t.dtype, t.shape) for key, t in checkpoint.items()}
        chunks = sum(len(t.chunks) for t in checkpoint.values())
        lines = [f"torch_dist checkpoint {folder}", f"chunks      {chunks}"]
    sizes = {
        name: dtype.itemsize * torch.Size(shape).numel() for name, (dtype, shape) in tensors.items()
    }
    numbers = sum(torch.Size(shape).numel() for _, shape in tensors.values())
    lines += [
        f"tensors     {len(tensors)}",
        f"parameters  {numbers / 1e6:,.1f} M",
        f"bytes       {sum(sizes.values()) / 1e9:.2f} GB",
    ]
    width = max((len(name) for name in tensors), default=0)
    for name, (dtype, shape) in sorted(tensors.items()):
        lines.append(f"  {name:<{width}}  {str(dtype).removeprefix('torch.'):<9} {list(shape)}")
    return "\n".join(lines)


def find_checkpoint(megatron: Path, config: Path | None) -> tuple[Path, Path]:
    """The checkpoint folder, and the folder with its model's config.json and tokenizer; ValueError
    if one of them does not exist."""
    megatron = weights_folder(megatron)
    folder = checkpoint_folder(megatron)
    if config is not None:
        return folder, config
    try:
        return folder, companion_folder(megatron)
    except ValueError as error:
        raise ValueError(f"{error}, or pass the model's Hugging Face folder as --config") from error


def _describe_model(
    hf: Path, release: Path, index: MegatronIndex, dtype: torch.dtype | None
) -> None:
    """Write what Megatron's loader, Megatron-LM and Megatron-Bridge read beside the tensors."""
    config = read_model_config(hf)
    write_checkpoint_index(release, index.tensors, index.objects, common_state(config))
    stored = cast("torch.dtype | None", config.dtype)  # transformers has converted its name
    content = run_config(config, dtype or _plain_dtype(hf) or stored)
    if content is not None:
        (release / RUN_CONFIG).write_text(yaml.safe_dump(content, sort_keys=False))


def read_shape(folder: Path) -> ModelShape:
    """Sizes of the model that a folder's config describes; ValueError if Megatron cannot represent
    it (``mppo.models.families.architectures``)."""
    from mppo.models.families.architectures import family_config

    config = read_model_config(folder)
    family_config(config)
    return model_shape(config)


def _plain_dtype(hf: Path) -> torch.dtype | None:
    """The dtype of weights that are dequantised during conversion; None for other weights."""
    quantised = "quantization_config" in read_json(hf / "config.json")
    return torch.bfloat16 if quantised else None


def _state(hf: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of a folder's weight files, which identify its weights."""
    files = sorted(hf.glob("*.safetensors"))
    return [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]


def _report(out: Path, count: int, nbytes: int, started: float, extras: tuple[str, ...]) -> str:
    seconds = time.monotonic() - started
    free = shutil.disk_usage(out).free / 1e9
    line = (
        f"{out}: {count} tensors, {nbytes / 1e9:.2f} GB in {seconds:.1f} s "
        f"({nbytes / 1e9 / max(seconds, 1e-9):.2f} GB/s), {free:.0f} GB left on the disk"
    )
    if extras:
        line += f"\n{len(extras)} tensors are not part of the model, such as {extras[0]}"
    return line

"""A weight loader that runs inside the SGLang servers that mppo starts.

SGLang calls ``load(model, named_tensors)`` (its ``custom_weight_loader`` option) with two tensors:
the bytes of a bucket, and a table with the bucket's layout. An exception here would end the server,
so errors are written to the file that the table gives; the trainer reads it after each bucket.

If the table has checksums, the loader verifies the bytes, that the server's model has a parameter
for every tensor, and, if it can compare them, that the parameter holds the tensor after loading.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from mppo.parallel.device import wait_for_stream
from mppo.weights.bucket import BucketLayout, WeightBucket

LOADER = "mppo.rollout.transport.checked_load.load"
BYTES, TABLE = "mppo.bytes", "mppo.table"
_WORD = 4
_FUSED = (
    (r"\.(q|k|v)_proj\.(weight|bias)$", r".qkv_proj.\2"),
    (r"\.(gate|up)_proj\.(weight|bias)$", r".gate_up_proj.\2"),
    (r"\.(q_a_proj|kv_a_proj_with_mqa)\.weight$", ".fused_qkv_a_proj_with_mqa.weight"),
    (r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight$", ".experts.w13_weight"),
    (r"\.experts\.\d+\.(down_proj|w2)\.weight$", ".experts.w2_weight"),
)
"""Checkpoint names (patterns), and the fused parameter of SGLang that holds the tensor."""
_TIED = "lm_head.weight"
"""Has no parameter where embeddings are tied."""

Checksum = tuple[int, int]


def tensor_checksum(flat: Tensor) -> Checksum:
    """The sum of all 32-bit words, and of every second one, of bytes padded with zeros (uint8)."""
    if flat.numel() % _WORD:
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % _WORD)])
    words = flat.view(torch.int32)
    return int(words.sum(dtype=torch.int64)), int(words[::2].sum(dtype=torch.int64))


def bucket_table(
    layout: BucketLayout, checksums: Sequence[Checksum] | None, report: Path, single_rank: bool
) -> Tensor:
    """The table of a bucket. ``checksums``: one per tensor, in the layout's order; None: the server
    verifies nothing. ``single_rank``: the server has one rank, so its tensors are not sharded."""
    return json_table(report, single_rank=single_rank, layout=layout.to_json(), checksums=checksums)


def json_table(report: Path, **content: Any) -> Tensor:
    """A table for ``load_reported``, as JSON bytes: uint8 on the CPU."""
    text = json.dumps({"report": str(report), **content})
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def load(model: nn.Module, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Load a bucket; errors are written to the report."""

    def step(table: dict[str, Any], content: Tensor) -> None:
        bucket = WeightBucket(BucketLayout.from_json(table["layout"]), content)
        if table["checksums"] is None:
            _load_weights(model, bucket)
        else:
            _load_checked(model, bucket, table["checksums"], table["single_rank"])

    load_reported(named_tensors, step)


def load_reported(
    named_tensors: list[tuple[str, Tensor]], step: Callable[[dict[str, Any], Tensor], None]
) -> None:
    """Give ``step`` the table and the bytes; its errors are written to the table's report."""
    received = dict(named_tensors)
    table = json.loads(received[TABLE].cpu().numpy().tobytes())
    try:
        step(table, received[BYTES])
        # once the server answers, the trainer overwrites the bucket, which copies may still read
        wait_for_stream(received[BYTES].device)
    except Exception as error:
        with Path(table["report"]).open("a") as report:
            report.write(f"{type(error).__name__}: {error}\n")


def _load_weights(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    load_weights = cast("Callable[[list[tuple[str, Tensor]]], object]", model.load_weights)
    load_weights(list(tensors))


def _load_checked(
    model: nn.Module, bucket: WeightBucket, checksums: Sequence[Sequence[int]], single_rank: bool
) -> None:
    """Verify the bucket, load it, and verify what the model then holds; the ValueError names the
    first tensor that arrived changed or was not loaded."""
    for place, checksum in zip(bucket.layout.places, checksums, strict=True):
        if list(tensor_checksum(bucket.content[place.start : place.end])) != list(checksum):
            raise ValueError(f"verify_sync: {place.name} arrived with other bytes than were sent")
    held = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for place in bucket.layout.places:
        if _parameter_name(place.name, held) is None and place.name != _TIED:
            raise ValueError(
                f"verify_sync: {place.name} was sent, but SGLang's model has no such tensor"
            )
    _load_weights(model, bucket)
    if not single_rank:  # a rank holds shards, which are not compared
        return
    for name, tensor in bucket:
        part = _part(name, tensor, held)
        if part is not None and not torch.equal(part, tensor.to(part.device, part.dtype)):
            raise ValueError(f"verify_sync: {name} was sent, but SGLang holds something else")


def _parameter_name(name: str, held: dict[str, Tensor]) -> str | None:
    """The parameter that holds a checkpoint's tensor, alone or fused with others."""
    if name in held:
        return name
    fused = (re.sub(pattern, into, name) for pattern, into in _FUSED)
    return next((other for other in fused if other != name and other in held), None)


def _part(name: str, tensor: Tensor, held: dict[str, Tensor]) -> Tensor | None:
    """The part of a parameter that holds a checkpoint's tensor; None if it cannot be located.
    Experts on a GPU are not compared: the kernel decides their order."""
    parameter_name = _parameter_name(name, held)
    if parameter_name is None:
        return None
    parameter, rows = held[parameter_name].detach(), len(tensor)
    expert = re.search(r"\.experts\.(\d+)\.", name)
    if ".experts." in parameter_name and expert is not None:
        if parameter.device.type != "cpu":
            return None
        parameter = parameter[int(expert[1])]
    if parameter.shape == tensor.shape:
        return parameter
    if parameter.dim() != tensor.dim() or parameter.shape[1:] != tensor.shape[1:]:
        return None
    kind = name.rsplit(".", 2)[-2]
    # keys and values are the last two of the fused projection; halves of gate and up may be padded
    last = len(parameter) - rows
    first = {
        "q_proj": 0, "k_proj": last - rows, "v_proj": last,
        "gate_proj": 0, "up_proj": len(parameter) // 2, "w1": 0, "w3": len(parameter) // 2,
    }.get(kind)  # fmt: skip
    return None if first is None else parameter[first : first + rows]

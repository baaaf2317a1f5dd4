"""A role's model and optimizer as Megatron sharded state, in layout-independent coordinates.

Every tensor has the name and the coordinates of a model parameter: ``<key>`` holds the weights;
``optimizer.state.<kind>.<key>`` holds the optimizer's moments (``exp_avg``, ``exp_avg_sq``) and, if
the weights are not float32, its float32 copy of them (``param``); ``average.<key>`` holds the
weights' moving average, if there is one. A rank of a distributed optimizer owns a flat range of
some parameters. The range is written as rectangles, without communication, and read into place in
the same way. A checkpoint can therefore be loaded in any layout and with any optimizer sharding.

Megatron's own ``fully_reshardable`` format, which gathers complete buckets first, writes moments of
the wrong parameters if a bucket is padded and not the last one (overlapped gradient reduction, tied
embeddings in a pipeline): its buffers omit the padding between buckets that its offsets include.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from mppo.checkpoint.rectangles import Rectangle, rectangles
from mppo.models.adam import resume_steps, steps_taken
from mppo.models.role import Role
from mppo.parallel.collectives import largest_of_ranks
from mppo.parallel.moved_storages import MovedStorages
from mppo.recipe.model_shape import VALUE_BINS, model_shape
from mppo.safety.input_error import InputError
from mppo.safety.input_files import read_json
from mppo.weights.torch_dist.contents import read_checkpoint
from mppo.weights.torch_dist.sharded_load import load_sharded

STATE = "run.json"
"""File of a checkpoint with the states that are neither tensors nor random."""
_METADATA = {"singleton_local_shards": False}
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SHAPE_KEYS = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "ffn_dim", "vocab_size", "num_experts", "n_routed_experts",
    "num_local_experts", "tie_word_embeddings",
)  # fmt: skip


def describe_model(
    hf_config: Any, head: str, dtype: torch.dtype, value_bins: int = 1
) -> dict[str, Any]:
    """Describe a model, with ``head`` "policy" or "value", by the values that a checkpoint and the
    loading model must share."""
    shape = {key: getattr(hf_config, key) for key in _SHAPE_KEYS if hasattr(hf_config, key)}
    bins = {} if value_bins == 1 else {VALUE_BINS: value_bins}
    return {**shape, **bins, "head": head, "dtype": str(dtype).removeprefix("torch.")}


def describe_role(role: Role) -> dict[str, Any]:
    settings = role.settings
    return describe_model(role.hf_config, settings.head, role.dtype, settings.value_bins)


def role_bytes(role: Role) -> float:
    """Estimate the bytes of a role in a checkpoint: weights, moments, float32 weights, the moving
    average. Of experts that are spread over ranks only one rank's are counted."""
    width = role.dtype.itemsize
    each = width + 8 + (4 if width < 4 else 0) + (width if role.weights.average is not None else 0)
    here = sum(p.numel() for stage in role.stages for p in stage.parameters())
    return float(each * here * role.layout.tp * role.layout.pp)


def sharded_state(role: Role) -> dict[str, Any]:
    """Make Megatron's sharded state of a role. The layout's groups must be active. Its tensors
    share memory with the role's; ``load_sharded`` fills those of the optimizer in place. Those of
    parts in host memory are views of it."""
    model: dict[str, Any] = {}
    with _readable_parameters(role) as readable:
        for i, stage in enumerate(role.stages):
            model[f"chunk{i}"] = stage.sharded_state_dict(prefix="", metadata=dict(_METADATA))
    state: dict[str, Any] = {"model": model}
    if role.optimizer is not None:
        entries = {id(entry.data): entry for entry in nested_values(model) if _is_sharded(entry)}
        pieces = []
        for part in role.optimizer.parts:
            for share in _shares(part):
                tensors = _state_of(share, part.optimizer.state, role.optimizer.state)
                parameter = readable.get(id(share.parameter), share.parameter)
                pieces += _pieces(share, parameter, entries[id(parameter)], tensors)
        state["optimizer"] = dict(enumerate(pieces))
    if role.weights.average is not None:
        averages = role.weights.average.of_parameters()
        averages |= {id(p): averages[original] for original, p in readable.items()}
        state["average"] = _averages(model, averages)
    return state


@contextmanager
def _readable_parameters(role: Role) -> Iterator[dict[int, torch.nn.Parameter]]:
    """Inside the context, parameters in host memory are replaced in their modules by views of it,
    yielded by ``id``. The parameters keep their device: hooks of Megatron's DDP depend on it."""
    storages = role.weights.storages
    replaced: dict[int, torch.nn.Parameter] = {}
    places = []
    for module in (m for stage in role.stages for m in stage.modules() if storages.is_moved):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in replaced:
                view = torch.nn.Parameter(storages.readable(parameter), requires_grad=False)
                vars(view).update(vars(parameter))
                replaced[id(parameter)] = view
            places.append((module, name, parameter))
    try:
        for module, name, parameter in places:
            module._parameters[name] = replaced[id(parameter)]
        yield replaced
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


def _averages(model: dict[str, Any], averages: dict[int, Tensor]) -> dict[str, dict[str, Any]]:
    """The parameters' entries with their moving averages as data, under keys of their own."""

    def with_average(entry):
        average = averages[id(entry.data)]
        dtype = {"dtype": average.dtype} if isinstance(entry, ShardedTensor) else {}
        return replace(entry, key=f"average.{entry.key}", data=average, **dtype)

    return {
        chunk: {
            name: with_average(entry)
            for name, entry in entries.items()
            if _is_sharded(entry) and id(entry.data) in averages
        }
        for chunk, entries in model.items()
    }


@dataclass(frozen=True)
class _Share:
    """The range of a flattened parameter that this rank's optimizer updates."""

    parameter: Tensor
    main: Tensor
    start: int
    stop: int


def _shares(part) -> Iterator[_Share]:
    """The ranges of one of Megatron's optimizers: distributed, mixed-precision, or float32."""
    if isinstance(part, DistributedOptimizer):
        groups = part.optimizer.param_groups
        for buckets in (b for ranges in part.gbuf_ranges for b in ranges.values()):
            for parameter, ranges in (item for b in buckets for item in b["param_map"].items()):
                group, order = part.model_param_group_index_map[parameter]
                main, owned = groups[group]["params"][order], ranges["param"]
                yield _Share(parameter, main, owned.start, owned.end)
        return
    if hasattr(part, "float16_groups"):
        pairs = [
            pair
            for halves, mains in zip(part.float16_groups, part.fp32_from_float16_groups)
            for pair in zip(halves, mains)
        ]
        pairs += [(p, p) for group in part.fp32_from_fp32_groups for p in group]
    else:
        pairs = [(p, p) for group in part.optimizer.param_groups for p in group["params"]]
    for parameter, main in pairs:
        yield _Share(parameter, main, 0, parameter.numel())


def _state_of(share: _Share, states, storages: MovedStorages) -> dict[str, Tensor]:
    """The share's moments, and its main weights if the parameter is not float32."""
    tensors = {kind: storages.readable(states[share.main][kind]) for kind in _MOMENTS}
    if share.parameter.dtype != share.main.dtype:
        tensors["param"] = storages.readable(share.main)
    return tensors


def _pieces(
    share: _Share, parameter: Tensor, entry, tensors: dict[str, Tensor]
) -> list[ShardedTensor]:
    leaves = [entry] if isinstance(entry, ShardedTensor) else list(nested_values(entry.build()))
    pieces = []
    for leaf in leaves:
        # a factory builds several leaves, each a view of a contiguous part of the parameter
        data = leaf.data
        assert data is not None
        assert data.is_contiguous()
        first = int(data.storage_offset() - parameter.storage_offset())
        start = max(share.start - first, 0)
        stop = min(share.stop - first, data.numel())
        for block in rectangles(leaf.local_shape, start, stop) if start < stop else ():
            # from the leaf's flat coordinates to those of this rank's range
            begin = block.start + first - share.start
            for kind, tensor in tensors.items():
                flat = tensor.detach().view(-1)[begin : begin + block.size]
                pieces.append(_piece(leaf, block, f"optimizer.state.{kind}", flat))
    return pieces


def _piece(leaf: ShardedTensor, block: Rectangle, prefix: str, flat: Tensor) -> ShardedTensor:
    """One rectangle as a sharded tensor of its own, at its place in the stored tensor."""
    assert isinstance(leaf.replica_id, tuple), "Megatron's modules give (pp, tp, dp)"
    ones = (1,) * leaf.prepend_axis_num  # the layer axis, if layers are stacked under one key
    offset = (0,) * leaf.prepend_axis_num + block.offset
    return replace(
        leaf,
        key=f"{prefix}.{leaf.key}",
        data=flat.view(ones + block.shape),
        dtype=flat.dtype,
        local_shape=ones + block.shape,
        global_offset=tuple(a + b for a, b in zip(leaf.global_offset, offset)),
        axis_fragmentations=None,
        prepend_axis_num=0,
        replica_id=(*leaf.replica_id[:2], 0),
    )


def _is_sharded(entry: Any) -> bool:
    return isinstance(entry, ShardedTensor | ShardedTensorFactory)


def load_roles(folder: Path, roles: Mapping[str, Role]) -> None:
    """Load the models and optimizers of a checkpoint. Collective. ValueError, KeyError, TypeError,
    OSError: the folder is not a checkpoint, is damaged, or has other models."""
    counters = read_json(folder / STATE, nan=True)["roles"]
    for name, role in roles.items():
        load_role(role, folder / name, counters[name])


def load_role(role: Role, folder: Path, counters: dict[str, int]) -> None:
    """Load a role's weights and optimizer, in any layout, with the ``role_counters`` of the run
    that saved it. InputError: the checkpoint is damaged or lacks tensors. Collective."""
    with role.groups.active(), torch.no_grad():
        state = sharded_state(role)
        averages = {
            chunk: {name: entry.data for name, entry in entries.items()}
            for chunk, entries in state.get("average", {}).items()
        }
        vocab = model_shape(role.hf_config).vocab
        loaded, absent = load_sharded(folder, read_checkpoint(folder), state, vocab)
        if absent:
            raise InputError(
                f"{folder}: {len(absent)} tensors of {role.name} are missing, such as {min(absent)}"
            )
        for i, stage in enumerate(role.stages):
            _load_stage(stage, loaded["model"][f"chunk{i}"], folder)
        for chunk, entries in averages.items():
            for name, average in entries.items():
                average.copy_(loaded["average"][chunk][name])
        if role.optimizer is not None:
            resume_steps(role.optimizer.parts, counters["optimizer_step"])
            role.optimizer.resume_schedule(counters["schedule_step"])


def _load_stage(stage, tensors: dict[str, Any], folder: Path) -> None:
    missing, unexpected = stage.load_state_dict(tensors, strict=False)
    wrong = [key for key in [*missing, *unexpected] if not key.endswith("_extra_state")]
    if wrong:
        raise InputError(f"{folder}: parameters do not match the model: {', '.join(wrong[:5])}")


def role_counters(role: Role) -> dict[str, int]:
    """Step counts of optimizer and schedule, the same on every rank. Collective."""
    if role.optimizer is None:
        return {}
    (furthest,) = largest_of_ranks([steps_taken(role.optimizer.parts)])
    return {
        "optimizer_step": int(furthest),
        "schedule_step": int(role.optimizer.schedule.num_steps),
    }

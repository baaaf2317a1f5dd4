"""A role's model and optimizer as Megatron sharded state, in coordinates no layout changes.

Every tensor is named and placed as the model's parameters are: ``model.<key>`` holds the weights,
``optimizer.state.<kind>.<key>`` the optimizer's float32 weights (``param``) and moments
(``exp_avg``, ``exp_avg_sq``). Whichever optimizer a layout uses (distributed or not, one for all
parameters or one more for the experts), it writes and reads these same tensors, so that a
checkpoint can be taken up under any layout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from mppo.models.role import Role
from mppo.parallel import device

_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
_KINDS = ("param", "exp_avg", "exp_avg_sq")
_SHAPE_KEYS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "tie_word_embeddings",
)


def describe_model(role: Role) -> dict[str, Any]:
    """What must agree between a checkpoint and the model that takes it up."""
    config = role.hf_config
    shape = {key: getattr(config, key) for key in _SHAPE_KEYS if hasattr(config, key)}
    return {**shape, "head": role.spec.head, "trained": role.optimizer is not None}


def sharded_state(role: Role, loading: bool = False) -> dict[str, Any]:
    """Megatron sharded state of a role; the layout's groups must be active. Collective.

    Args:
        role: the role.
        loading: placeholders to load into, rather than the values.
    """
    model: dict[str, Any] = {}
    for i, stage in enumerate(role.stages):
        model[f"chunk{i}"] = stage.sharded_state_dict(prefix="", metadata=dict(_METADATA))
    state: dict[str, Any] = {"model": model}
    if role.optimizer is not None:
        parts = optimizer_parts(role)
        state["optimizer"] = {
            i: _optimizer_tensors(part, model, loading) for i, part in enumerate(parts)
        }
    return state


def optimizer_parts(role: Role) -> list:
    """The optimizers Megatron made: one, and one more for experts that are spread over ranks."""
    assert role.optimizer is not None
    whole = role.optimizer.megatron
    return [p for p in getattr(whole, "chained_optimizers", [whole]) if p.optimizer is not None]


def _optimizer_tensors(part, model: dict[str, Any], loading: bool) -> dict[int, dict[str, Any]]:
    part.init_state_fn(part.optimizer, part.config)
    if isinstance(part, DistributedOptimizer):
        return part.sharded_param_state_fully_reshardable(model, loading, dict(_METADATA))
    place = {id(entry.data): entry for entry in nested_values(model) if _is_sharded(entry)}
    tensors = {}
    for i, (parameter, main) in enumerate(_plain_pairs(part)):
        values = {"param": main, **part.optimizer.state[main]}
        tensors[i] = {
            kind: make_sharded_optimizer_tensor(
                place[id(parameter)], values[kind].detach(), f"optimizer.state.{kind}"
            )
            for kind in _KINDS
        }
    return tensors


def _is_sharded(entry: Any) -> bool:
    return isinstance(entry, ShardedTensor | ShardedTensorFactory)


def _plain_pairs(part) -> list[tuple[Tensor, Tensor]]:
    """Model parameter and the tensor the optimizer steps, for an optimizer that is not sharded."""
    pairs = []
    if hasattr(part, "float16_groups"):
        for halves, mains in zip(part.float16_groups, part.fp32_from_float16_groups):
            pairs += list(zip(halves, mains))
        pairs += [(p, p) for group in part.fp32_from_fp32_groups for p in group]
        return pairs
    return [(p, p) for group in part.optimizer.param_groups for p in group["params"]]


def load_role(role: Role, folder: str, counters: dict[str, int]) -> None:
    """Take up a role's weights and optimizer from its part of a checkpoint. Collective.

    Args:
        role: built for the same model, in any layout.
        folder: the role's folder.
        counters: ``role_counters`` of the run that saved it.

    Raises:
        ValueError: the checkpoint lacks tensors of this role.
    """
    with role.groups.active(), torch.no_grad():
        wanted = sharded_state(role, loading=True)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = get_default_load_sharded_strategy(folder)
        if dist.get_world_size(group) > 1 and device.is_cuda():
            strategy = FullyParallelLoadStrategyWrapper(strategy, group)
        loaded, missing, _ = dist_checkpointing.load(
            wanted, folder, strategy, strict=StrictHandling.RETURN_ALL
        )
        missing = sorted(key for key in missing if not key.endswith("_extra_state"))
        if missing:
            raise ValueError(
                f"{folder}: lacks {len(missing)} tensors of {role.name}, such as {missing[0]}"
            )
        for i, stage in enumerate(role.stages):
            _load_stage(stage, loaded["model"][f"chunk{i}"], folder)
        if role.optimizer is not None:
            for i, part in enumerate(optimizer_parts(role)):
                _load_optimizer(part, loaded["optimizer"][i], counters["optimizer_step"])
            role.optimizer.resume_schedule(counters["schedule_step"])


def _load_stage(stage, tensors: dict[str, Any], folder: str) -> None:
    missing, unexpected = stage.load_state_dict(tensors, strict=False)
    wrong = [key for key in [*missing, *unexpected] if not key.endswith("_extra_state")]
    if wrong:
        raise ValueError(f"{folder}: parameters do not match the model: {', '.join(wrong[:5])}")


def _load_optimizer(part, tensors: dict[int, dict[str, Tensor]], step: int) -> None:
    if isinstance(part, DistributedOptimizer):
        part.load_parameter_state_from_fully_reshardable(tensors)
    else:
        for i, (_, main) in enumerate(_plain_pairs(part)):
            values = {"param": main, **part.optimizer.state[main]}
            for kind in _KINDS:
                values[kind].copy_(tensors[i][kind])
    for group in part.optimizer.param_groups:
        group["step"] = step


def role_counters(role: Role) -> dict[str, int]:
    """How far optimizer and schedule have come, the same on every rank. Collective."""
    if role.optimizer is None:
        return {}
    steps = [
        int(group.get("step", 0))
        for part in optimizer_parts(role)
        for group in part.optimizer.param_groups
    ]
    furthest = torch.tensor(max(steps, default=0), device=device.device())
    dist.all_reduce(furthest, op=dist.ReduceOp.MAX)
    return {
        "optimizer_step": int(furthest),
        "schedule_step": int(role.optimizer.schedule.num_steps),
    }

"""One process group for all axes of all layouts that have the same ranks.

Megatron creates about forty groups per layout, most of them with the members of another one. Each
group that is used costs a communicator: device memory under NCCL, a polling thread under gloo.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch.distributed as dist

PIPELINE_BACK = "PIPELINE_BACK_GROUP"
PIPELINE_WRAP, PIPELINE_WRAP_BACK = "PIPELINE_WRAP_GROUP", "PIPELINE_WRAP_BACK_GROUP"
"""Descriptions of the groups of messages that ``LayoutGroups`` adds to Megatron's."""

_ACROSS_STAGES = (
    "PIPELINE_MODEL_PARALLEL_GROUP",
    PIPELINE_BACK,
    PIPELINE_WRAP,
    PIPELINE_WRAP_BACK,
    "EMBEDDING_GROUP",
    "POSITION_EMBEDDING_GROUP",
    "MODEL_PARALLEL_GROUP",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
)
"""Descriptions of groups with ranks of several pipeline stages, besides the one for gradient norms.
Stages run different lists of actions, so they may begin messages, sums of tied embeddings and sums
of norms in different orders; a communicator executes everything in one order. Each of these
descriptions therefore has its own group. Ranks of one stage run the same list."""


def install(backend: str) -> None:
    """Make Megatron's ``create_group`` return an existing group with the same ranks; idempotent.
    ``backend`` is that of groups for which Megatron names none."""
    parallel_state = vars(importlib.import_module("megatron.core.parallel_state"))
    create = parallel_state["create_group"]
    if not hasattr(create, "__wrapped__"):
        parallel_state["create_group"] = _shared(create, backend)


def _shared(create: Any, default: str) -> Any:
    world: Any = None
    groups: dict[tuple, Any] = {}

    @functools.wraps(create)
    def create_or_find(ranks=None, timeout=None, backend=None, group_desc=None, **kwargs):
        nonlocal world, groups
        assert ranks is not None, "Megatron names the ranks of every group"
        if world is not dist.group.WORLD:  # the default group was destroyed, and with it all others
            world, groups = dist.group.WORLD, {}
        apart = group_desc if group_desc in _ACROSS_STAGES else None
        # torch orders the ranks of a group
        key = (tuple(sorted(ranks)), timeout, backend or default, apart)
        if key not in groups:
            groups[key] = create(ranks, timeout, backend, group_desc=group_desc, **kwargs)
        return groups[key]

    return create_or_find

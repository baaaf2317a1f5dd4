"""Convert the servers' responses into trajectories on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.batch import Trajectory
from mppo.parallel.collectives import all_gather_varlen, raise_on_any_rank
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.packed_responses import FINISH, pack_rows, unpack_rows
from mppo.rollout.sglang.api import ServerResponse
from mppo.rollout.sglang.http_client import RequestRefused
from mppo.rollout.sglang.routed_experts import (
    RoutingShape,
    attach,
    decode_routed_experts,
    routed_tokens,
)

_NO_TOKENS = torch.empty(0, dtype=torch.int32)


def joined(before: Trajectory | None, more: Trajectory) -> Trajectory:
    """Append a continuation to an earlier part of a response."""
    if before is None:
        return more
    return replace(
        more,
        response_ids=torch.cat([before.response_ids, more.response_ids]),
        logprobs=torch.cat([before.logprobs, more.logprobs]),
        earlier=before.parts,
    )


def complete_prompts(found: Mapping[int, Trajectory], request: GenerationRequest) -> list[int]:
    """Prompts whose samples are all finished, in order."""
    n = request.sampling.n
    done = {key for key, trajectory in found.items() if trajectory.finish_reason != "abort"}
    return [p for p in range(len(request.prompts)) if done.issuperset(range(p * n, p * n + n))]


def gather_answers(
    mine: Mapping[int, ServerResponse],
    request: GenerationRequest,
    version: int,
    known: Mapping[int, Trajectory],
    routing: RoutingShape | None,
    world: int,
    group: dist.ProcessGroup | None,
) -> dict[int, Trajectory]:
    """Every rank's responses by ``prompt * n + sample``, on every rank; collective.

    Args:
        mine: responses of this rank's servers.
        request: the request they belong to.
        version: of the weights.
        known: earlier parts of responses, which ``mine`` continues.
        routing: shape of the routed experts in each response; None: none.
        world: ranks in ``group``.
        group: process group; None is the default one.

    Raises:
        RuntimeError: on every rank, if routed experts are missing.
    """
    found = dict(known)
    rows = all_gather_varlen(_packed(mine), world, group)
    for received in rows:
        for key, more in unpack_rows(received, request, version).items():
            found[key] = joined(known.get(key), more)
    if routing is not None:
        chosen = _routed_experts(mine, found, routing, world, group)
        found |= attach(found, rows, chosen, routing, world, group)
    return found


def _routed_experts(
    mine: Mapping[int, ServerResponse],
    found: Mapping[int, Trajectory],
    routing: RoutingShape,
    world: int,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """The routed experts of this rank's finished responses, flat; raises on every rank."""
    parts, error = [torch.empty(0, dtype=torch.int16)], None
    try:
        for key, row in mine.items():
            if row.reason == "abort":
                continue
            parts.append(
                decode_routed_experts(
                    row.routed_experts, routing, routed_tokens(found[key])
                ).flatten()
            )
    except RequestRefused as refused:
        error = str(refused)
    raise_on_any_rank(error, world, group)
    return torch.cat(parts)


def _packed(mine: Mapping[int, ServerResponse]) -> Tensor:
    """This rank's responses, packed for the exchange between ranks."""
    rows = mine.values()
    return pack_rows(
        torch.tensor(list(mine), dtype=torch.int64),
        torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64),
        torch.tensor([FINISH.index(row.reason) for row in rows], dtype=torch.int64),
        torch.cat([_NO_TOKENS, *(row.tokens for row in rows)]),
        torch.cat([torch.empty(0), *(row.logprobs for row in rows)]),
    )

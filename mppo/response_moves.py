"""Bringing the tokens of responses to the ranks that need them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mppo.batch import Trajectory
from mppo.parallel.collectives import group_size
from mppo.parallel.exchange import Moves, exchange
from mppo.responses import ResponseRow, Responses

_NO_IDS = torch.empty(0, dtype=torch.int32)
_NO_LOGPROBS = torch.empty(0)
_NO_EXPERTS = torch.empty(0, dtype=torch.int16)


def bring_responses(
    responses: Responses,
    wanted: Sequence[Sequence[int]],
    group: dist.ProcessGroup | None = None,
) -> dict[int, Trajectory]:
    """Bring responses from their homes to the ranks that want them. Collective.

    Args:
        responses: numbered from 0.
        wanted: numbers of the responses that each rank wants, the same on every rank.
        group: a group of CPU ranks; None is the default one.

    Returns:
        This rank's trajectories by number, in the order wanted.
    """
    rows, held = responses.table, responses.held
    moves = Moves([row.home for row in rows], wanted)
    mine = wanted[dist.get_rank(group) if group_size(group) > 1 else 0]
    if moves.is_local:
        return {number: held[number] for number in mine}
    numbers = [number for number in responses.rows if number in held]
    lengths = [row.length for row in rows]
    tensors = [
        torch.cat([_NO_IDS, *(held[i].response_ids for i in numbers)]),
        torch.cat([_NO_LOGPROBS, *(held[i].logprobs for i in numbers)]),
    ]
    ids, logprobs = exchange(moves, lengths, numbers, lambda _: tensors, group)
    sizes = [lengths[number] for number in mine]
    experts: list[Tensor | None] = [None] * len(mine)
    if any(row.routed for row in rows):
        experts = _bring_experts(responses, moves, mine, group)
    parts = zip(mine, ids.split(sizes), logprobs.split(sizes), experts, strict=True)
    return {
        number: _trajectory(rows[number], response_ids, values, chosen)
        for number, response_ids, values, chosen in parts
    }


def bring_ids(responses: Responses, wanted: Sequence[Sequence[int]]) -> dict[int, Tensor]:
    """Bring the generated tokens alone to the ranks that want them. Collective.

    Args:
        responses: numbered from 0.
        wanted: as for ``bring_responses``; the ranks are those of the default group.

    Returns:
        This rank's tokens, int32, by number, in the order wanted.
    """
    rows, held = responses.table, responses.held
    homes = [row.home for row in rows]
    moving = [[i for i in part if homes[i] != rank] for rank, part in enumerate(wanted)]
    sent = {number for part in moving for number in part}
    numbers = [number for number in responses.rows if number in sent and number in held]
    ids = torch.cat([_NO_IDS, *(held[number].response_ids for number in numbers)])
    lengths = [row.length for row in rows]
    (got,) = exchange(Moves(homes, moving), lengths, numbers, lambda _: [ids])
    rank = dist.get_rank() if group_size() > 1 else 0
    parts = got.split([lengths[number] for number in moving[rank]])
    came = dict(zip(moving[rank], parts, strict=True))
    return {i: came[i] if i in came else held[i].response_ids for i in wanted[rank]}


def bring_ids_to_first(responses: Responses) -> list[Tensor]:
    """The generated tokens of all responses on the first rank; no others. Collective.

    Args:
        responses: numbered from 0.
    """
    elsewhere: list[Sequence[int]] = [()] * (group_size() - 1)
    return list(bring_ids(responses, [range(len(responses)), *elsewhere]).values())


def _bring_experts(
    responses: Responses, moves: Moves, mine: Sequence[int], group: dist.ProcessGroup | None
) -> list[Tensor | None]:
    """Routed experts of the responses that this rank wants; collective."""
    rows, held = responses.table, responses.held
    shapes = [row.routed or (0, 0, 0) for row in rows]
    sizes = [tokens * layers * chosen for tokens, layers, chosen in shapes]
    numbers = [number for number in responses.rows if number in held]
    found = [held[number].routed_experts for number in numbers]
    flat = [x.to(torch.int16).flatten() for x in found if x is not None]
    values = torch.cat([_NO_EXPERTS, *flat])
    (got,) = exchange(moves, sizes, numbers, lambda _: [values], group)
    parts = zip(mine, got.split([sizes[i] for i in mine]), strict=True)
    return [part.view(shapes[i]) if rows[i].routed else None for i, part in parts]


def _trajectory(
    row: ResponseRow, ids: Tensor, logprobs: Tensor, experts: Tensor | None
) -> Trajectory:
    version, earlier = row.parts[-1][0], row.parts[:-1]
    return Trajectory(row.prompt, ids, logprobs, row.finish_reason, version, experts, earlier)

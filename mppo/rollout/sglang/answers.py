"""Convert the servers' responses into episodes on the ranks that received them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mppo.batch.episode import Episode
from mppo.batch.shares import bring_episodes
from mppo.parallel.collectives import raise_on_any_rank
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.response_gather import gather_episodes
from mppo.rollout.sglang.http_client import RequestRefused
from mppo.rollout.sglang.routed_experts import RoutingShape, decode_routed_experts, routed_tokens
from mppo.rollout.sglang.server_response import ServerResponse


def take_up(
    resumed: Mapping[int, Episode],
    usable: Sequence[int],
    homes: Mapping[int, int],
    world: int,
) -> dict[int, Episode]:
    """Responses of an earlier request that this one need not generate from the start; collective.

    Finished ones stay at home; those to be continued move to the ranks that will continue them. All
    are by index in the result; ``usable`` ones are taken.
    """
    found = {key: resumed[key] for key in usable}
    begun = [key for key in usable if found[key].is_unfinished]
    wanted: list[list[int]] = [[] for _ in range(world)]
    for number, key in enumerate(begun):
        wanted[homes[key]].append(number)
        found[key] = found[key].elsewhere(homes[key])
    came = bring_episodes([resumed[key] for key in begun], wanted)
    return found | {begun[number]: each for number, each in came.items()}


def add_answers(
    known: Mapping[int, Episode],
    mine: Mapping[int, ServerResponse],
    request: GenerationRequest,
    routing: RoutingShape | None,
    world: int,
) -> dict[int, Episode]:
    """Responses by ``prompt * n + sample``: those known, continued by ``mine``, and what all ranks
    received. Collective; on every rank RuntimeError if routed experts are missing, and ValueError
    if a log-probability is not finite."""
    received: dict[int, Episode] = {}
    error = None
    for key, answer in mine.items():
        response = answer.episode(request.sample_at(key)[0])
        if key in known and known[key].tokens is not None:
            response = known[key].followed_by(response)
        # the tokens of an aborted response are routed again when it is continued
        if routing is not None and answer.reason != "abort":
            try:
                experts = decode_routed_experts(
                    answer.routed_experts, routing, routed_tokens(response)
                )
            except RequestRefused as refused:
                error = str(refused)
                break
            response = response.with_experts(experts)
        received[key] = response
    if routing is not None:
        raise_on_any_rank(error, world)
    # a response that was continued may have another home than its beginning
    return {**known, **gather_episodes(received, request, world)}

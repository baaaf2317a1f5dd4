"""A single router: precision, replayed choices, choices dropped by a capacity."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from layout_case import Case, build_role, run_cases
from torch import Tensor

TOKENS, EXPERTS, CHOSEN = 40, 4, 2
CAPACITY = {"moe_expert_capacity_factor": 0.9}
BALANCE = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3}
CASES = {
    "fp32": Case("mixtral"),
    "fp64": Case("mixtral", {"moe_router_dtype": "fp64"}),
    "fp32 of bfloat16": Case("mixtral", dtype="bfloat16"),
    "fp64 of bfloat16": Case("mixtral", {"moe_router_dtype": "fp64"}, dtype="bfloat16"),
    "balance": Case("mixtral", BALANCE),
    "capacity": Case("mixtral", BALANCE | CAPACITY),
}


@dataclass(frozen=True)
class Routed:
    """A router's results for random tokens.

    Args:
        logits, weights: ``[n, E]``.
        exact: the logits in float64.
        kept: bool ``[n, E]``, choices less those dropped.
        metrics: the role's.
        recorded, moved, replayed: ``[n, k]``, experts chosen at first, by other weights, and by
            those other weights with the first choices replayed for all but the last token.
        near: ``[n, k]``, chosen where the second and third best differ by 2 ** -26.
    """

    logits: Tensor
    exact: Tensor
    weights: Tensor
    kept: Tensor
    metrics: dict[str, float]
    recorded: Tensor
    moved: Tensor
    replayed: Tensor
    near: Tensor


def _route(case: Case, folder, registry) -> Routed:
    """Call the first router of a role, outside its model."""
    from mppo.models.attention.packed_sequences import MicroRouting, Packing
    from mppo.models.moe.router import moe_layers

    role = build_role(case, folder, registry)
    router = next(moe_layers(role.stages)).router
    origin = torch.arange(TOKENS)

    def choices(x: Tensor, chosen: Tensor | None = None) -> Tensor:
        record = torch.zeros(1, TOKENS, CHOSEN, dtype=torch.uint8)
        routing = MicroRouting(training=False, record=record, chosen=chosen)
        router.packing = Packing(positions=origin, origin=origin, routing=routing)
        router(x)
        return record[0]

    one_sequence = torch.zeros(TOKENS, dtype=torch.int64)
    routing = MicroRouting(training=True, sequence_t=one_sequence, num_sequences=1)
    router.packing = Packing(positions=origin, origin=origin, routing=routing)
    random = torch.Generator().manual_seed(5)
    x = torch.randn(TOKENS, 1, router.weight.shape[1], generator=random).to(router.weight.dtype)
    logits = router.gating(x)[:, 0]
    exact = x[:, 0].double() @ router.weight.double().t()
    weights, kept = router(x)
    metrics = role.routing_metrics()
    with torch.no_grad():
        recorded = choices(x)
        router.weight.add_(torch.randn(router.weight.shape, generator=random), alpha=0.1)
        moved = choices(x)
        expected = recorded.long().clone()
        expected[-1] = -1
        replayed = choices(x, expected[None])
        router.weight.zero_()
        router.weight[:, 0] = torch.tensor([1.0, 1.0, 2.0, 0.0])
        router.weight[1, 1] = 2.0**-26
        near = choices(torch.ones_like(x))
    return Routed(
        logits=logits.detach(),
        exact=exact.detach(),
        weights=weights.detach(),
        kept=kept,
        metrics=metrics,
        recorded=recorded,
        moved=moved,
        replayed=replayed,
        near=near,
    )


@pytest.fixture(scope="module")
def routed(tmp_path_factory) -> dict[str, Routed]:
    folder = tmp_path_factory.mktemp("router")
    return dict(zip(CASES, run_cases(list(CASES.values()), 1, folder, _route)))


@pytest.mark.parametrize("name", ["fp32", "fp32 of bfloat16"])
def test_a_router_computes_in_float32_by_default(name, routed) -> None:
    assert routed[name].logits.dtype == routed[name].weights.dtype == torch.float32
    error = (routed[name].logits - routed[name].exact).abs().max()
    assert 0 < error < 1e-5


@pytest.mark.parametrize("name", ["fp64", "fp64 of bfloat16"])
def test_a_router_computes_in_float64_with_fp64(name, routed) -> None:
    assert routed[name].logits.dtype == routed[name].weights.dtype == torch.float64
    assert (routed[name].logits - routed[name].exact).abs().max() < 1e-13
    assert (routed[name].near == torch.tensor([2, 1])).all()  # to float32, 0 and 1 are equal


def test_replayed_choices_are_the_recorded_ones_bit_for_bit(routed) -> None:
    for found in routed.values():
        assert torch.equal(found.replayed[:-1], found.recorded[:-1])
        assert torch.equal(found.replayed[-1], found.moved[-1])  # -1: the router's own choice
        assert not torch.equal(found.moved, found.recorded)


def test_a_capacity_keeps_each_experts_choices_of_largest_weight(routed) -> None:
    free, limited = routed["balance"], routed["capacity"]
    assert free.kept.sum() == TOKENS * CHOSEN
    room = math.ceil(CAPACITY["moe_expert_capacity_factor"] * TOKENS * CHOSEN / EXPERTS)
    kept = torch.zeros_like(free.kept)
    for expert in range(EXPERTS):
        chosen = free.kept[:, expert].nonzero()[:, 0]
        order = free.weights[chosen, expert].argsort(descending=True)
        kept[chosen[order[:room]], expert] = True
    assert torch.equal(limited.kept, kept)
    torch.testing.assert_close(limited.weights, free.weights * kept)
    dropped = 1 - int(kept.sum()) / (TOKENS * CHOSEN)
    assert dropped > 0.05
    for name in ("actor/moe/dropped", "actor/moe/layer_0/dropped"):
        assert limited.metrics[name] == pytest.approx(dropped)
        assert free.metrics[name] == 0


def test_the_balance_loss_counts_choices_that_a_capacity_drops(routed) -> None:
    name = "actor/moe/aux_loss"
    assert routed["capacity"].metrics[name] == pytest.approx(routed["balance"].metrics[name])

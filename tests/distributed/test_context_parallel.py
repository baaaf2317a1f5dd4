"""Splitting sequences over ranks changes nothing: log-probs, values, losses, gradients, weights."""

from dataclasses import replace

import pytest
from layout_case import Case, Outcome, compare, run_cases

CP, TP, PP = "context_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP, EP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size"
LAYOUTS = {
    "CP2": {CP: 2},
    "CP4": {CP: 4},
    "CP2xTP2": {CP: 2, TP: 2},
    "CP2xTP2 without SP": {CP: 2, TP: 2, "sequence_parallel": False},
    "CP2xPP2xVPP2": {CP: 2, PP: 2, VPP: 2},
    "CP2xEP4": {CP: 2, EP: 4},
    "CP2xTP2xEP4": {CP: 2, TP: 2, EP: 4},
    "CP4 recompute": {CP: 4, "recompute_granularity": "full"},
    "CP2xPP2 offload": {CP: 2, PP: 2, "offload_activations": True},
    "CP2 selective": {CP: 2, "recompute_granularity": "selective"},
}
BALANCE = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3}
REFERENCES = {
    "qwen2": Case("qwen2"),
    "gemma2": Case("gemma2"),
    "mistral_window": Case("mistral_window"),
    "moonlight": Case("moonlight"),
    "moonlight value": Case("moonlight", head="value"),
    "qwen2_moe R2 balance": Case("qwen2_moe", BALANCE, role={"router_replay": "R2"}, steps=3),
}
CHOSEN = {
    "qwen2": ["CP2", "CP4", "CP2xTP2 without SP", "CP2xPP2xVPP2"],
    "gemma2": ["CP4"],
    "mistral_window": ["CP2xTP2", "CP4"],
    "moonlight": ["CP2xPP2 offload", "CP4 recompute", "CP2xTP2xEP4", "CP2 selective"],
    "moonlight value": ["CP2xTP2", "CP2xPP2xVPP2"],
    "qwen2_moe R2 balance": ["CP2xTP2xEP4", "CP2xEP4", "CP4 recompute"],
}
PAIRS = [(name, layout) for name, layouts in CHOSEN.items() for layout in layouts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("context")


@pytest.fixture(scope="module")
def alone(folder) -> dict[str, Outcome]:
    """Every reference, by one process."""
    return dict(zip(REFERENCES, run_cases(list(REFERENCES.values()), 1, folder)))


@pytest.fixture(scope="module")
def together(folder) -> dict[tuple[str, str], Outcome]:
    """Every pair of reference and layout, by four processes."""
    cases = [
        replace(
            REFERENCES[name],
            megatron=REFERENCES[name].megatron | LAYOUTS[layout],
            micro_batch=1 + index % 4,
        )
        for index, (name, layout) in enumerate(PAIRS)
    ]
    return dict(zip(PAIRS, run_cases(cases, 4, folder)))


@pytest.mark.distributed
@pytest.mark.parametrize("pair", PAIRS, ids=[f"{name} {layout}" for name, layout in PAIRS])
def test_context_parallelism_changes_nothing(pair, alone, together) -> None:
    compare(together[pair], alone[pair[0]])
    assert together[pair].routing == pytest.approx(alone[pair[0]].routing, abs=1e-5)

"""Context parallelism does not change log-probs, values, losses, gradients or weights."""

import pytest
from layout_case import Case, compare, pairs_of, run_matrix

CP, TP, PP = "context_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP, EP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size"
COMM = "cp_comm_type"
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
    "CP2xTP2 ring": {CP: 2, TP: 2, COMM: "p2p"},
    "CP4 ring": {CP: 4, COMM: "p2p"},
    "CP2xPP2 gather": {CP: 2, PP: 2, COMM: "all_gather"},
    "CP4 gather": {CP: 4, COMM: "all_gather"},
}
BALANCE = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3}
REFERENCES = {
    "qwen2": Case("qwen2"),
    "gemma2": Case("gemma2"),
    "mistral_window": Case("mistral_window"),
    "gpt_neox": Case("gpt_neox"),
    "opt": Case("opt"),
    "moonlight": Case("moonlight"),
    "moonlight value": Case("moonlight", head="value"),
    "qwen2_moe R2 balance": Case("qwen2_moe", BALANCE, role={"router_replay": "R2"}, steps=3),
    "moonlight R3": Case("moonlight", role={"router_replay": "R3"}),
}
# by default MLA (moonlight) uses the ring, the others gather
CHOSEN = {
    "qwen2": ["CP2", "CP4", "CP2xTP2 without SP", "CP2xPP2xVPP2", "CP4 ring"],
    "gemma2": ["CP4", "CP4 ring"],
    "mistral_window": ["CP2xTP2", "CP4", "CP2xTP2 ring", "CP4 ring"],
    "gpt_neox": ["CP2xTP2", "CP4 ring"],
    "opt": ["CP2xTP2"],
    "moonlight": [
        "CP2xPP2 offload",
        "CP4 recompute",
        "CP2xTP2xEP4",
        "CP2 selective",
        "CP4 gather",
    ],
    "moonlight value": ["CP2xTP2", "CP2xPP2xVPP2", "CP2xPP2 gather"],
    "moonlight R3": ["CP2xTP2xEP4", "CP2xPP2xVPP2"],
    "qwen2_moe R2 balance": ["CP2xTP2xEP4", "CP2xEP4", "CP4 recompute"],
}
PAIRS = pairs_of(CHOSEN)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_matrix(REFERENCES, LAYOUTS, CHOSEN, tmp_path_factory.mktemp("context"))


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_context_parallelism_changes_nothing(pair, outcomes) -> None:
    alone, together = outcomes
    compare(together[pair], alone[pair[0]])

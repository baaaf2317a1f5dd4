"""Mixtures of experts: the same loss, gradient norm and updated weights in every layout."""

import pytest
import torch
from layout_case import Case, batch_of, compare, engine_choices, pairs_of, run_matrix

LAYOUTS = {
    "EP2": {"expert_model_parallel_size": 2},
    "EP4": {"expert_model_parallel_size": 4},
    "TP2": {"tensor_model_parallel_size": 2},
    "TP2xEP2xPP2": {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
    },
    "TP2xETP2xEP2": {
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "expert_model_parallel_size": 2,
    },
    "ETP2": {"expert_tensor_parallel_size": 2},
    "PP2xVPP2xEP2": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
    },
    "PP2 uneven": {
        "pipeline_model_parallel_size": 2,
        "num_layers_in_last_pipeline_stage": 1,
        "expert_model_parallel_size": 2,
    },
    "PP2xVPP2 stated": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_layers": (1, 1, 1, 1),
    },
    "PP2 stated": {"pipeline_model_parallel_size": 2, "pipeline_layers": (3, 1)},
    "EP2 allgather recompute": {
        "expert_model_parallel_size": 2,
        "tensor_model_parallel_size": 2,
        "moe_token_dispatcher_type": "allgather",
        "recompute_granularity": "full",
    },
}
BALANCE = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.3,
    "moe_z_loss_coeff": 0.1,
}
SEQUENCE_BALANCE = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3}
BIAS = {"moe_router_bias_update_rate": 0.01}
REPLAY = {"router_replay": "R2"}
ENGINE = {"router_replay": "R3"}
CAPACITY = {"moe_expert_capacity_factor": 0.75}
"""Of a rank's tokens in a micro-batch: the same on layouts that leave sequences whole, with one
sequence in each micro-batch."""

REFERENCES = {
    "moonlight": Case("moonlight"),
    "qwen2_moe": Case("qwen2_moe"),
    "qwen3_moe": Case("qwen3_moe"),
    "mixtral": Case("mixtral"),
    "moonlight value": Case("moonlight", head="value"),
    "moonlight R2 sequence balance bias": Case(
        "moonlight", SEQUENCE_BALANCE | BIAS, role=REPLAY, steps=3
    ),
    "moonlight value R2": Case("moonlight", head="value", role=REPLAY, steps=3),
    "qwen2_moe R2": Case("qwen2_moe", role=REPLAY, steps=3),
    "qwen2_moe R2 beside a critic": Case(
        "qwen2_moe",
        role=REPLAY,
        steps=3,
        beside=Case("moonlight", head="value", role=REPLAY, steps=3),
    ),
    "qwen2_moe R3": Case("qwen2_moe", role=ENGINE),
    "qwen2_moe balance": Case("qwen2_moe", BALANCE),
    "qwen2_moe frozen router": Case("qwen2_moe", {"freeze_moe_router": True}),
    "qwen2_moe capacity": Case("qwen2_moe", CAPACITY, micro_batch=1),
    "moonlight fp64 router": Case("moonlight", {"moe_router_dtype": "fp64"}),
}
"""Runs of one process that layouts are compared with."""

CHOSEN = {
    "moonlight": list(LAYOUTS),
    "qwen2_moe": ["EP4", "TP2", "TP2xETP2xEP2", "PP2xVPP2xEP2"],
    "qwen3_moe": ["EP2", "TP2xEP2xPP2"],
    "mixtral": ["TP2", "TP2xEP2xPP2"],
    "moonlight value": ["TP2xEP2xPP2", "PP2xVPP2xEP2"],
    "moonlight R2 sequence balance bias": [
        "TP2xEP2xPP2",
        "PP2xVPP2xEP2",
        "EP2 allgather recompute",
    ],
    "qwen2_moe R2": ["EP4", "TP2xEP2xPP2"],
    "qwen2_moe R3": ["PP2xVPP2xEP2", "TP2xEP2xPP2", "EP2 allgather recompute"],
    "qwen2_moe balance": ["TP2xEP2xPP2", "EP4"],
    "qwen2_moe frozen router": ["TP2xEP2xPP2"],
    "qwen2_moe R2 beside a critic": ["TP2xEP2xPP2"],
    "qwen2_moe capacity": ["EP4", "PP2xVPP2xEP2"],
    "moonlight fp64 router": ["TP2xEP2xPP2"],
}
PAIRS = pairs_of(CHOSEN)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_matrix(REFERENCES, LAYOUTS, CHOSEN, tmp_path_factory.mktemp("moe"))


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_every_layout_trains_like_one_process(pair, outcomes) -> None:
    alone, together = outcomes
    compare(together[pair], alone[pair[0]])


def test_updates_change_routers_and_experts(outcomes) -> None:
    alone, _ = outcomes
    before, after = alone["moonlight"].initial, alone["moonlight"].weights
    for name in ("mlp.gate.weight", "mlp.experts.3.down_proj.weight", "shared_experts.up_proj"):
        touched = [key for key in after if name in key]
        assert touched
        assert all((before[key] != after[key]).any() for key in touched)


def test_the_expert_bias_is_constant_by_default(outcomes) -> None:
    key = "model.layers.1.mlp.gate.e_score_correction_bias"
    alone, _ = outcomes
    still, moved = alone["moonlight"], alone["moonlight R2 sequence balance bias"]
    assert torch.equal(still.weights[key], still.initial[key])
    steps = (moved.weights[key] - moved.initial[key]) / 0.01
    assert steps.abs().max() > 0.5
    torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0)


def test_a_frozen_router_does_not_change(outcomes) -> None:
    alone, _ = outcomes
    frozen = alone["qwen2_moe frozen router"]
    for key, weight in frozen.weights.items():
        stays = key.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
        assert torch.equal(weight, frozen.initial[key]) == stays, key


def test_replay_uses_recorded_experts_after_the_router_has_changed(outcomes) -> None:
    alone, _ = outcomes
    assert alone["qwen2_moe R2"].routing["actor/moe/replay_differing"] > 0
    assert "actor/moe/replay_differing" not in alone["qwen2_moe"].routing


def test_roles_in_one_process_replay_their_own_choices(outcomes) -> None:
    alone, _ = outcomes
    both = alone["qwen2_moe R2 beside a critic"]
    compare(both, alone["qwen2_moe R2"])
    compare(both.beside, alone["moonlight value R2"])


def test_choices_are_dropped_only_with_a_capacity_factor(outcomes) -> None:
    alone, _ = outcomes
    dropped = {
        name: [value for key, value in alone[name].routing.items() if key.endswith("dropped")]
        for name in ("qwen2_moe", "qwen2_moe capacity")
    }
    assert dropped["qwen2_moe"] == [0.0] * 4  # three layers, and over layers
    assert len(dropped["qwen2_moe capacity"]) == 4
    assert all(0.1 < share < 0.6 for share in dropped["qwen2_moe capacity"])


def test_the_experts_replayed_are_those_the_engine_chose(outcomes) -> None:
    alone, _ = outcomes
    routing = alone["qwen2_moe R3"].routing
    given = engine_choices(len(batch_of().tokens_T), layers=4, experts=4, chosen=2)
    for layer in (0, 2, 3):  # layer 1 is dense
        counts = torch.bincount(given[:, layer].flatten().long(), minlength=4).double()
        relative = counts / counts.mean() - 1
        for name, value in (("max_vio", relative.max()), ("min_vio", relative.min())):
            assert routing[f"actor/moe/layer_{layer}/{name}"] == pytest.approx(float(value))
    assert routing["actor/moe/replay_differing"] > 0.3


def test_auxiliary_losses_are_off_by_default(outcomes) -> None:
    alone, _ = outcomes
    assert "actor/moe/aux_loss" not in alone["qwen2_moe"].routing
    assert alone["qwen2_moe balance"].routing["actor/moe/aux_loss"] > 0.3

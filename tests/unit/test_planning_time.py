"""Formulas of the predicted time of a step, on kernels that take exactly their least time."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_time import ENDLESS, PEAK, Peak, role_load
from transformers import AutoConfig

import mppo
from mppo.batch.microbatches import MicroBatchLimits
from mppo.planning.checkpoint_space import checkpoint_bytes
from mppo.planning.time.collective_time import EFFICIENCY, Group, collective_seconds
from mppo.planning.time.cost import LAUNCH, Cost
from mppo.planning.time.generation_time import ENGINE, EnginePasses, Servers, decode_responses
from mppo.planning.time.kernels import Scaled
from mppo.planning.time.layer import ATTENTION_BACKWARD, DecoderLayer, gemms
from mppo.planning.time.lengths import quantiles, scattered
from mppo.planning.time.picture import draw_step, group_bars, rank_groups
from mppo.planning.time.role_load import TRAINER, AgentTurns, RolePasses, StepSequences
from mppo.planning.time.step import (
    Phase,
    Prediction,
    RoleShare,
    StepLoad,
    predict_generation,
    predict_step,
    predict_training,
)
from mppo.planning.time.upkeep import Upkeep, upkeep_phases
from mppo.recipe.model_shape import model_shape

DENSE = AutoConfig.for_model(
    "qwen3", vocab_size=1024, hidden_size=512, intermediate_size=2048, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=4, head_dim=64,
)  # fmt: skip
SPARSE = AutoConfig.for_model(
    "qwen3_moe", vocab_size=1024, hidden_size=512, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=64, num_experts=16, num_experts_per_tok=4,
    moe_intermediate_size=256, intermediate_size=2048,
)  # fmt: skip
SEQUENCES = StepSequences(64, 100, 300, 1000, 4)


# lengths


@given(st.integers(2, 5000), st.floats(0.02, 0.98), st.integers(1, 300))
def test_quantiles_have_the_mean_and_stay_within_the_maximum(longest, share, count):
    lengths = quantiles(share * longest, longest, count)
    assert lengths == sorted(lengths)
    assert 1 <= lengths[0] <= lengths[-1] <= longest
    if count > 100 and longest > 200 and 0.05 < share < 0.95:
        assert sum(lengths) / count == pytest.approx(share * longest, rel=0.05)


def test_half_of_the_maximum_is_the_uniform_distribution():
    assert quantiles(500, 1000, 4) == [125, 375, 625, 875]


def test_a_mean_at_the_maximum_leaves_one_length():
    assert quantiles(1000, 1000, 3) == [1000] * 3


def test_scattering_keeps_the_lengths_and_mixes_long_with_short():
    lengths = list(range(100))
    mixed = scattered(lengths)
    assert sorted(mixed) == lengths
    assert sum(mixed[:10]) / 10 == pytest.approx(49.5, abs=10)


# generation


def per_sequence(batch, context):
    return Cost(memory=batch)


def test_every_token_of_every_response_is_decoded_once():
    lengths = [100, 200, 300, 400]
    cost, _ = decode_responses(per_sequence, lengths, 10, slots=2)
    # responses that end within a few steps of each other are counted to the last one's end
    assert sum(lengths) <= cost.memory <= 1.05 * sum(lengths)


def test_one_slot_decodes_one_after_the_other():
    steps = []

    def step(batch, context):
        steps.append((batch, context))
        return Cost(memory=1.0)

    cost, tail = decode_responses(step, [50, 50], 10, slots=1)
    assert cost.memory == 100
    assert tail == 0
    assert {batch for batch, _ in steps} == {1}
    assert max(context for _, context in steps) <= 60


def test_the_tail_begins_when_few_are_left():
    # seven of eight end at 100 tokens, one goes on to 1000
    cost, tail = decode_responses(lambda batch, context: Cost(memory=1.0), [100] * 7 + [1000], 0, 8)
    assert cost.memory == 1000
    assert tail == pytest.approx(900, abs=30)


def test_a_small_cache_makes_generation_longer():
    shape = model_shape(DENSE)
    wide, narrow = (
        EnginePasses(PEAK, shape, 0, Servers(2, 1, 64, room)).generate(SEQUENCES).seconds
        for room in (None, 4 * SEQUENCES.length)
    )
    assert narrow > 1.5 * wide


def test_a_decoding_step_reads_all_weights_and_its_cache():
    shape = model_shape(DENSE)
    cost = EnginePasses(PEAK, shape, 0, Servers(1, 1, 64)).decode_step(1, 1000)
    layer = 512 * (512 + 2 * 256) + 512 * 512 + 3 * 512 * 2048
    weights = 2 * (4 * layer + 512 * 1024)
    cache = 4 * 2 * 256 * 1000 * 2
    assert cost.memory > ENGINE * (weights + cache) / PEAK.system.memory


def test_known_lengths_are_those_of_the_responses():
    known = StepSequences(64, 100, 25, 1000, known=(10, 20, 30, 40))
    assert known.responses(2) == [20, 40]
    assert known.responses(8) == [10, 10, 20, 20, 30, 30, 40, 40]
    assert known.sample(4) == [110, 120, 130, 140]


def test_a_beginning_that_is_not_shared_is_computed_again():
    engine = EnginePasses(PEAK, model_shape(DENSE), 0, Servers(2, 1, 64))
    turns, sequences = AgentTurns(3, tokens=20), replace(SEQUENCES, prompt=4000)
    shared, alone, talks, forgets = (
        engine.generate(replace(sequences, **changes)).prefill.seconds
        for changes in (
            {}, {"cached": False}, {"turns": turns}, {"turns": turns, "cached": False},
        )
    )  # fmt: skip
    assert alone == pytest.approx(4 * shared)  # four samples of a prompt
    added = talks - shared
    assert 0 < added < 0.1 * shared  # 40 tokens of 32 responses, after 8 prompts of 4000
    # at least the prompt again in both turns, for each response
    assert forgets - alone > 2 * alone


def test_agents_make_some_tokens_and_take_their_time_for_each_filling():
    engine = EnginePasses(PEAK, model_shape(DENSE), 0, Servers(2, 1, 16))
    turns = AgentTurns(3, seconds=2.0, tokens=75)
    plain, found = (engine.generate(replace(SEQUENCES, turns=one)) for one in (AgentTurns(), turns))
    assert found.agents == 3 * 2.0 * 2  # 32 responses on 16 slots
    assert found.seconds == found.prefill.seconds + found.decoding.seconds + 12.0
    # half of the 300 tokens are the agent's
    assert found.decoding.seconds == pytest.approx(plain.decoding.seconds / 2, rel=0.15)
    phase = predict_step(step_load(sequences=replace(SEQUENCES, turns=turns)), PEAK).phases[0]
    assert phase.spent["agents"] == 6.0
    assert sum(phase.spent.values()) == pytest.approx(phase.seconds, rel=0.02)


# links


def test_a_group_within_a_node_has_the_measured_time():
    assert collective_seconds(PEAK, "all_gather", 1e9, Group(8)) == PEAK.collective(
        "all_gather", 1e9, 8
    )


def test_a_ring_over_nodes_uses_the_network_cards_of_its_members():
    full = collective_seconds(PEAK, "all_gather", 1e9, Group(16))
    one_per_node = collective_seconds(PEAK, "all_gather", 1e9, Group(2, 8))
    assert full == pytest.approx(1e9 * 15 / 16 / (EFFICIENCY * 8 * 50e9), rel=0.05)
    assert one_per_node == pytest.approx(1e9 / 2 / (EFFICIENCY * 50e9), rel=0.05)


def test_all_to_all_sends_what_is_for_other_nodes_through_one_card():
    found = collective_seconds(PEAK, "alltoall", 1e9, Group(16))
    assert found == pytest.approx(1e9 / 2 / (EFFICIENCY * 50e9), rel=0.05)


def test_one_rank_communicates_with_nobody():
    assert collective_seconds(PEAK, "all_reduce", 1e9, Group(1, 8)) == 0


# costs and layers


def test_the_longer_of_host_and_device_decides():
    assert Cost(compute=1.0, launches=10).seconds == 1.0
    slow = Cost(compute=1e-6, launches=10)
    assert slow.seconds == pytest.approx(10 * LAUNCH)
    assert slow.slower(2.0).seconds == slow.seconds
    assert (Cost(1, 2, 3, 4) + Cost(1, 1, 1, 1)) * 2 == Cost(4, 6, 8, 10)


def test_the_backward_pass_has_two_products_for_each_of_the_forward_pass():
    forward, backward = (gemms(PEAK, [(64, 128, 256)], way) for way in (False, True))
    assert backward.compute == pytest.approx(2 * forward.compute)
    assert (forward.launches, backward.launches) == (1, 2)


@pytest.mark.parametrize(("config", "active"), [(DENSE, 0), (SPARSE, 4)])
def test_a_layer_computes_the_operations_that_its_flops_count(config, active):
    shape = model_shape(config)
    sparse = bool(active)
    layer = DecoderLayer(ENDLESS, shape, active, role_load(config).layout, sparse, 4096, 4096)
    flops = role_load(config).flops
    # the head's share of the last layer is counted per output
    operations = flops.forward([4096], 4096) - 4096 * 2 * 512 * 1024
    assert layer.forward.compute * PEAK.system.flops == pytest.approx(operations / 4, rel=0.02)
    attention = flops.per_pair * 4096**2 / 2 / PEAK.system.flops
    products = layer.forward.compute - attention
    assert layer.backward.compute == pytest.approx(
        2 * products + ATTENTION_BACKWARD * attention, rel=0.02
    )


@pytest.mark.parametrize("config", [DENSE, SPARSE])
def test_tensor_parallel_ranks_halve_the_products_and_exchange(config):
    loads = [replace(role_load(config, tp=tp), lean_head=False) for tp in (1, 2)]
    one, two = (RolePasses(ENDLESS, load, SEQUENCES) for load in loads)
    whole, half = (sum((c.compute for c in role.forward), 0.0) for role in (one, two))
    # twice the sequences on a rank, half of each product
    assert half * two.measuring.count == pytest.approx(whole * one.measuring.count, rel=0.05)
    assert one.forward[0].network == 0
    assert two.forward[0].network > 0


def test_expert_parallel_ranks_send_tokens_to_their_experts():
    one, two = (role_load(SPARSE, world=8, ep=ep) for ep in (1, 8))
    alone, divided = (RolePasses(PEAK, load, SEQUENCES).forward[0] for load in (one, two))
    assert alone.network == 0
    assert divided.network > 0


def test_context_parallel_ranks_divide_the_attention():
    layouts = [role_load(DENSE, cp=cp) for cp in (1, 2)]
    one, two = (RolePasses(PEAK, load, SEQUENCES) for load in layouts)
    total = [role.forward[0].compute * role.measuring.count for role in (one, two)]
    assert total[1] == pytest.approx(total[0], rel=0.1)


def test_recomputation_adds_a_forward_pass():
    plain, full = (
        RolePasses(PEAK, role_load(DENSE, recomputes=recomputes), SEQUENCES)
        for recomputes in (False, True)
    )
    added = full.training_backward[0].compute - plain.training_backward[0].compute
    head = TRAINER * gemms(PEAK, [(1, 1024, 512)], False).compute
    assert added == pytest.approx(plain.training_forward[0].compute, rel=0.3)
    assert added < plain.training_forward[0].compute + head


def test_micro_batches_are_those_of_a_run():
    load = role_load(DENSE, limits=MicroBatchLimits(1, 1100))
    role = RolePasses(PEAK, load, SEQUENCES)
    assert role.measuring.tokens <= 1100
    assert role.measuring.count * role.measuring.tokens == pytest.approx(
        SEQUENCES.tokens / load.layout.dp, rel=0.05
    )


# the step


def step_load(**changes):
    values = {
        "sequences": SEQUENCES, "roles": [role_load(DENSE), role_load(DENSE, name="critic")],
        "servers": Servers(8, 1, 64), "schedule": "flush_free", "measured": ["actor", "critic"],
        "gpus": 8,
    }  # fmt: skip
    return StepLoad(**{**values, **changes})


def test_a_step_is_the_sum_of_its_phases():
    prediction = predict_step(step_load(), PEAK)
    names = [phase.name for phase in prediction.phases]
    assert names == [
        "generation", "old log-probabilities", "values", "update of actor and critic",
        "weight sync",
    ]  # fmt: skip
    assert prediction.seconds == pytest.approx(sum(phase.seconds for phase in prediction.phases))
    for phase in prediction.phases:
        assert sum(phase.spent.values()) == pytest.approx(phase.seconds, rel=0.02), phase.name
    assert prediction.throughput == pytest.approx(SEQUENCES.tokens / prediction.seconds / 8)


def test_one_step_ahead_the_longer_side_decides():
    together = predict_step(step_load(), PEAK)
    beside = predict_step(step_load(overlapped=True), PEAK)
    generation = together.phases[0].seconds
    assert beside.seconds == pytest.approx(max(generation, together.seconds - generation))


def upkeep_of(upkeep, *settings):
    sampled = ("rollout.val_kwargs.n=2", "rollout.val_kwargs.temperature=1.0",
               "data.max_prompt_length=8", "data.max_response_length=8")  # fmt: skip
    plan = mppo.plan(mppo.load({}, *sampled, "data.task=reverse", *settings), 1)
    load = step_load()
    found = upkeep_phases(plan.recipe, plan.plans, load, PEAK, upkeep, 1.0)
    return plan, load, {phase.name: phase for phase in found}


def test_validation_has_its_share_of_a_step():
    _, load, found = upkeep_of(Upkeep(prompts=32), "trainer.test_freq=5")
    # two responses for each of 32 prompts are as many as those of the step, in other groups
    whole = predict_generation(
        replace(load, sequences=replace(SEQUENCES, count=64, samples=2)), PEAK
    )
    assert found["validation"].seconds == pytest.approx(whole.seconds / 5)
    assert sum(found["validation"].spent.values()) == pytest.approx(whole.seconds / 5, rel=0.02)


@pytest.mark.parametrize("beside", [True, False])
def test_a_checkpoint_has_its_share_of_a_step(beside):
    settings = ("trainer.save_freq=4", f"trainer.async_save={beside}".lower())
    plan, _, _ = upkeep_of(Upkeep(), *settings)
    nbytes = checkpoint_bytes(plan.recipe, plan.plans)
    for written in (2.0, 10.0):
        spent = upkeep_of(Upkeep(disk=nbytes / written), *settings)[2]["checkpoints"].spent
        # beside four steps of a second, only what takes longer is waited for
        assert spent["disk"] == pytest.approx(max(0.0, written - 4 * beside) / 4)
        copied = nbytes / (EFFICIENCY * PEAK.system.host) / 4
        assert spent["host"] == pytest.approx(copied if beside else 0.0)


def test_what_a_processor_exchanges_it_computes_itself():
    slow = Peak(beside=False)
    layout = {"world": 2, "tp": 2}
    beside, own = (
        predict_step(step_load(roles=[role_load(DENSE, **layout)], measured=[]), kernels)
        for kernels in (PEAK, slow)
    )
    network = [one.phases[1].spent["network"] for one in (beside, own)]
    assert network[1] > 1.4 * network[0]
    roles = [role_load(DENSE), role_load(DENSE, name="critic")]
    beside, own = (predict_step(step_load(roles=roles), kernels) for kernels in (PEAK, slow))
    assert own.phases[3].seconds > beside.phases[3].seconds


def test_copies_take_the_host_s_bandwidth():
    phase = predict_step(step_load(copied=50e9), PEAK).phases[-1]
    assert phase.name == "copies to and from the host"
    assert phase.seconds == pytest.approx(50e9 / (EFFICIENCY * PEAK.system.host))


def test_no_phase_is_faster_than_the_peak():
    prediction = predict_step(step_load(), PEAK)
    uses = [prediction.utilization(phase) for phase in prediction.phases]
    assert all(use is None or 0 < use < 1 for use in uses)
    assert uses[0] is None


def test_a_deeper_pipeline_with_few_micro_batches_is_idle():
    loads = [role_load(DENSE, pp=4, limits=MicroBatchLimits(8)) for _ in range(1)]
    phases = predict_step(step_load(roles=loads, measured=[], schedule="sequential"), PEAK).phases
    update = next(phase for phase in phases if phase.name.startswith("update"))
    assert update.spent["idle pipeline"] > 0.1 * update.seconds


def test_roles_that_share_a_stream_fill_the_pipeline_once():
    roles = [role_load(DENSE, pp=2), role_load(DENSE, name="critic", pp=2)]
    apart, streamed = (
        {phase.name: phase.seconds for phase in predict_step(load, PEAK).phases}
        for load in (step_load(roles=roles), step_load(roles=roles, streamed=True))
    )
    filling = min(cost.seconds for cost in RolePasses(PEAK, roles[1], SEQUENCES).forward)
    assert streamed["values"] == pytest.approx(apart["values"] - filling)
    assert streamed["old log-probabilities"] == apart["old log-probabilities"]


def test_what_takes_the_most_binds_a_phase():
    phase = Phase("update", 3.0, {"compute": 1.0, "network": 2.0}, 1)
    assert phase.bound == "network"
    assert Prediction((phase,), 10, 1, 1e12, "").utilization(phase) is None


def test_a_role_s_use_is_that_of_its_own_part_of_a_shared_update():
    roles = {"actor": RoleShare(6e12, 1.0), "critic": RoleShare(1e12, 0.5)}
    update = Phase("update of actor and critic", 3.0, {"compute": 1.5}, 2, roles)
    values = Phase("values", 1.0, {"compute": 1.0}, 2, {"critic": RoleShare(1e12, 1.0)})
    prediction = Prediction((update, values), 10, 2, 1e12, "")
    assert prediction.utilization(update) == pytest.approx(7 / 6)
    # 2 of 3 seconds are the actor's, 1 + 1 the critic's
    assert prediction.role_utilization() == pytest.approx({"actor": 6 / 4, "critic": 2 / 4})


def test_a_gpu_is_idle_in_waits_and_beside_phases_of_others():
    generation = Phase("generation", 4.0, {"memory": 4.0}, 4)
    update = Phase("update of actor", 2.0, {"compute": 1.0, "idle pipeline": 1.0}, 12)
    apart = Prediction((generation, update), 10, 16, 1e12, "")
    whole = 6.0 * 16
    assert apart.idle()["idle pipeline"] == pytest.approx(12 / whole)
    assert apart.idle()["GPUs without a phase"] == pytest.approx(1 - (16 + 24) / whole)
    beside = Prediction((generation, update), 10, 16, 1e12, "", overlapped=True)
    assert beside.idle()["GPUs without a phase"] == pytest.approx(1 - (16 + 24) / 64)
    assert beside.gpu_hours == pytest.approx(4.0 * 16 / 3600)


def test_each_stage_s_seconds_are_those_of_the_phase():
    loads = [role_load(DENSE, pp=2), role_load(DENSE, name="critic", pp=2)]
    prediction = predict_step(step_load(roles=loads), PEAK)
    for phase in prediction.phases:
        for spent in phase.stages:
            assert sum(spent.values()) == pytest.approx(phase.seconds, rel=1e-3), phase.name
    assert [len(phase.stages) for phase in prediction.phases] == [0, 2, 2, 2, 0]


@pytest.mark.parametrize("schedule", ["sequential", "fused", "flush_free"])
@pytest.mark.parametrize("pp", [1, 4])
def test_the_formula_of_an_update_is_close_to_its_simulation(schedule, pp):
    limits = MicroBatchLimits(1, 1100)
    loads = [role_load(DENSE, name, pp=pp, limits=limits) for name in ("actor", "critic")]
    load = step_load(roles=loads, schedule=schedule)
    simulated, formula = (
        sum(phase.seconds for phase in predict_training(load, PEAK, way)) for way in (True, False)
    )
    assert formula == pytest.approx(simulated, rel=0.15)


def test_a_picture_has_a_bar_for_each_group_and_phase(tmp_path):
    loads = [role_load(DENSE, pp=2), role_load(DENSE, name="critic", pp=2)]
    shared = predict_step(step_load(roles=loads), PEAK)
    assert rank_groups(shared, 8) == ["ranks 0 to 3", "ranks 4 to 7"]
    assert len(list(group_bars(shared, 8))) == 2 * len(shared.phases)
    apart = predict_step(
        step_load(roles=loads, gpus=12, servers=Servers(4, 1, 64), overlapped=True), PEAK
    )
    bars = list(group_bars(apart, 8))
    assert rank_groups(apart, 8)[-1] == "servers"
    assert [bar.start for bar in bars if bar.phase.name == "generation"] == [0.0]
    assert bars[1].start == 0.0
    draw_step("a run", apart, 8, tmp_path / "step.svg")
    drawn = (tmp_path / "step.svg").read_text()
    for text in ("servers", "ranks 4 to 7", "compute", "predicted seconds of a step"):
        assert text in drawn


def test_kernels_of_another_gpu_keep_their_share_of_the_least_time():
    slower = Scaled(PEAK, "half", PEAK.system.flops / 2, PEAK.system.memory, PEAK.system.within)
    assert slower.gemm(8192, 8192, 8192) == pytest.approx(2 * PEAK.gemm(8192, 8192, 8192))
    # reads weights: its memory is as fast
    assert slower.gemm(1, 8192, 8192) == pytest.approx(PEAK.gemm(1, 8192, 8192))
    assert "half" in slower.source
    assert math.isclose(slower.decode(8, 1000, 8, 1, 64), PEAK.decode(8, 1000, 8, 1, 64))


def test_the_seconds_of_a_collective_follow_the_links():
    ring = SimpleNamespace(system=PEAK.system, collective=PEAK.collective)
    assert collective_seconds(ring, "all_reduce", 1e9, Group(16)) > collective_seconds(
        ring, "all_gather", 1e9, Group(16)
    )

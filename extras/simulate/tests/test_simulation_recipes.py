"""The recipes for GPUs executed at their real width on a simulated GPU, one of those with equal
ranks (``recipe_list``), and mistakes that no test on a CPU can see.

Every pipeline's first and last stage runs: one of each kind of layer and layout with Transformer
Engine, the others without it; one of each kind of layout runs both ways. One process simulates all
cases of a variant, each in a fork. A case has the fewest layers per pipeline chunk among which is
every kind of layer; one of each kind of layout is scaled to the recipe's depth. A small model and a
recipe of eight layers also run in full; with ``MPPO_SIMULATE_ALL=1`` DeepSeek-V3 too.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from planned_time import PEAK
from recipe_list import ALIKE, FULL_DEPTH, simulated_recipes
from simulated import recipe_case, shallow

from mppo.planning.run_plan import plan_roles
from mppo.planning.time.recipe import recipe_load
from mppo.planning.time.role_load import RolePasses, StepSequences

ROOT, HERE = Path(__file__).parents[3], Path(__file__).parent
FIRST = sorted({f"first:{name}" for name in simulated_recipes().values()})
LAST = [
    "last:deepseek_llm_7b_gsm8k_math",
    "last:deepseek_v3_671b_gsm8k",
    "last:moonlight_16b_a3b_gsm8k",
    "last:qwen1.5_moe_a2.7b_gsm8k",
    "last:qwen2.5_32b_gsm8k_math",
    "last:qwen2_7b_gsm8k_math",
    "last:qwen3_30b_a3b_gsm8k_math",
    "last:qwen3_8b_gsm8k_math",
]
"""The recipes in which a role has more than one stage."""
KINDS = [name for name in (*FIRST, *LAST) if name not in ALIKE]
"""One case of each kind of layer and layout, for Transformer Engine."""
PLAIN = [name for name in (*FIRST, *LAST) if name in ALIKE or name in FULL_DEPTH]
"""The other cases, and one of each kind of layout, without Transformer Engine."""
STORED = "stored:deepseek_llm_7b_gsm8k_math"
"""A recipe with stored activations: its backward pass computes none of them again."""
FULL = ["small", "deepseek_llm_7b_gsm8k_cp2"]
"""Cases that run in full too, the recipe with some of its layers: others take minutes."""
if os.environ.get("MPPO_SIMULATE_ALL"):
    FULL.append("deepseek_v3_671b_gsm8k")
TE_FOLDER = ROOT / ".venv" / "te"
MISTAKES = (
    "targets_left_on_the_host",
    "tokens_not_moved",
    "weights_gathered_over_the_wrong_group",
    "gradients_allocated_twice",
)
KEPT = "with:"
OFFLOADED = "with:actor.megatron.offload_activations=true critic.megatron.offload_activations=true"
MOVED = "with:" + " ".join(
    f"{role}.megatron.offload.{part}=true"
    for role in ("actor", "critic")
    for part in ("parameters", "gradients", "optimizer")
)
HYBRID = "with:actor.optim.cpu_offload_fraction=1.0 critic.optim.cpu_offload_fraction=0.5"
RESUMED = f"resumed:{HYBRID.removeprefix('with:')}"
REWARDED = (
    "with:reward_model.path=builtin:tiny-reward reward_model.enable=true "
    "reward_model.micro_batch_size_per_gpu=4 reward_model.megatron.tensor_model_parallel_size=2 "
    "reward.weight=0"
)
INTERLEAVED = "with:" + " ".join(
    f"{role}.megatron.{virtual}pipeline_model_parallel_size=2"
    for role in ("actor", "critic")
    for virtual in ("", "virtual_")
)
SEQUENTIAL = f"{INTERLEAVED} trainer.schedule=sequential"
TRAINED_PARTS = ("weights", "gradients", "main weights", "moments")
WITHOUT, WITH = "without Transformer Engine", "with Transformer Engine"
WAITS = json.loads((HERE / "simulated_waits.json").read_text())
"""By variant, case and phase with micro-batches: how often the host waits for the GPU in the case's
few layers and micro-batches; "host_waits" in what ``simulated.py CASE`` prints."""
MOST_OPERATIONS = {
    "first:qwen2.5_32b_gsm8k_math": 45,
    "last:moonlight_16b_a3b_gsm8k": 52,
    "first:gemma_2_2b_gsm8k": 11,
    "first:deepseek_llm_7b_gsm8k_cp2": 8,
}
"""Operations of a weight sync, at two layers a chunk."""


@pytest.fixture(scope="module")
def simulated() -> dict[str, dict[str, Any]]:
    return run_cases(
        *PLAIN,
        STORED,
        KEPT,
        OFFLOADED,
        MOVED,
        HYBRID,
        RESUMED,
        REWARDED,
        INTERLEAVED,
        SEQUENTIAL,
        *(f"{mode}:{name}" for name in FULL for mode in ("full", "quick")),
        *(f"mistake:{name}" for name in MISTAKES),
    )


@pytest.fixture(scope="module")
def simulated_with_te() -> dict[str, dict[str, Any]]:
    if not (TE_FOLDER / "transformer_engine").is_dir():
        pytest.skip("Transformer Engine's Python is not installed: make .venv/.te")
    return run_cases(*KINDS, STORED, MPPO_TEST_TE_FOLDER=str(TE_FOLDER))


def run_cases(*names: str, **variables: str) -> dict[str, dict[str, Any]]:
    """The summaries of these cases of ``simulated.py``, by name."""
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}:{HERE.parent}"}
    chosen = ("MPPO_DEVICE", "NVTE_")  # Megatron sets NVTE_* in a process that built a model
    environment = {k: v for k, v in os.environ.items() if not k.startswith(chosen)}
    environment |= variables | ours
    found = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "simulated.py"), *names],
        capture_output=True, text=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return {row.pop("name"): row for row in map(json.loads, found.stdout.splitlines())}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", PLAIN)
def test_a_recipe_runs_and_holds_what_the_plan_says(name, simulated):
    check(simulated[name], WAITS[WITHOUT][name])


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", KINDS)
def test_a_recipe_runs_with_transformer_engine(name, simulated_with_te):
    check(simulated_with_te[name], WAITS[WITH][name])


def check(found: dict[str, Any], waits: dict[str, int]) -> None:
    """Assert that a case ran, held what the plan says, and waited as often as the table says."""
    assert "error" not in found, found["stack"]
    most = 0.02 * found["whole"]
    assert found["resident"] == pytest.approx(found["planned"], abs=most)
    assert found["pinned"] == pytest.approx(found["planned_host"], abs=most)
    assert found["host_waits"] == waits, found["waiting"]


@pytest.mark.parametrize("recipe", [
    "qwen3_30b_a3b_gsm8k_math", "moonlight_16b_a3b_gsm8k", "qwen1.5_moe_a2.7b_gsm8k",
    "qwen2.5_32b_gsm8k_math",
])  # fmt: skip
def test_a_predicted_time_counts_the_simulated_waits(recipe):
    case = shallow(recipe_case(recipe))
    data = case.recipe.data
    lengths = (data.max_prompt_length, data.max_response_length, data.max_response_length)
    sequences = StepSequences(data.train_batch_size * case.recipe.rollout.n, *lengths)
    plans = plan_roles(case.recipe, case.world_size, case.hf_configs)
    load = recipe_load(case.recipe, plans, None, case.hf_configs, sequences)
    waits = WAITS[WITH][f"first:{recipe}"]
    for role in (RolePasses(PEAK, one, sequences) for one in load.roles):
        if role.load.name == "critic":
            count = role.forward[0].waits * role.measuring.count
            assert count == waits["computing values with critic"]
        passes = role.training_forward[0].waits + role.training_backward[0].waits
        count = passes * role.training.count + role.optimizer(0).waits
        assert count * role.load.mini_batches == waits[f"updating {role.load.name}"]


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", [*PLAIN, STORED])
def test_the_plan_knows_the_peak_of_every_phase(name, simulated):
    check_peaks(simulated[name])


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", [*KINDS, STORED])
def test_the_plan_knows_the_peak_of_every_phase_with_transformer_engine(name, simulated_with_te):
    check_peaks(simulated_with_te[name])


def check_peaks(found: dict[str, Any]) -> None:
    """Assert that the plan's peaks and communicators are those of the simulation."""
    assert len(found["planned_peaks"]) >= 6  # one less where no old log-probabilities are computed
    for phase, planned in found["planned_peaks"].items():
        # the activations' share is as exact with offload as without, where all parts are there
        most = 0.05 * found["planned_without_offload"][phase]
        assert found["peaks"][phase] == pytest.approx(planned, abs=most), phase
    used, counted = found["communicators"]
    assert used == counted
    allocated, planned = found["buffers"]
    assert allocated == pytest.approx(planned, rel=0.01)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", [INTERLEAVED, SEQUENTIAL])
def test_the_plan_counts_what_an_interleaved_pipeline_keeps(name, simulated):
    """Outputs of all chunks in an update, messages and their communicators; after it, nothing."""
    found = simulated[name]
    used, counted = found["communicators"]
    assert used == counted
    phases = ("updating actor", "updating critic", "weight sync")
    for phase in phases:
        planned = pytest.approx(found["planned_peaks"][phase], rel=0.05)
        assert found["peaks"][phase] == planned, phase
    assert not any(found["held"].get(phase, 0) for phase in phases), found["held"]


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", FULL_DEPTH)
def test_a_recipe_fits_its_gpus_in_every_phase(name, simulated):
    """With the parts on the GPU that the plan leaves there, at the recipe's full depth, which costs
    a second simulation; that others fit, the plan says (``test_planning_residency.py``)."""
    found = simulated[name]
    assert "error" not in found, found["stack"]
    assert len(found["verdicts"]) >= 2, "A100 and H100"
    for gpu, verdict in found["verdicts"].items():
        assert verdict["same table"], f"{gpu}: the plan chooses another table than it simulates"
        assert verdict["fits"], f"{gpu}: {verdict['text']}"
        covered = {*found["planned_peaks"], "generation"}
        assert covered <= set(verdict["phases"])


@pytest.mark.parametrize("name", MOST_OPERATIONS)
def test_a_weight_sync_starts_no_more_operations_than_the_table_says(name, simulated):
    most = MOST_OPERATIONS[name]
    assert simulated[name]["operations"]["weight sync"] <= most


def test_a_step_waits_once_for_the_gradients_norm(simulated):
    waits = [
        places for phases in simulated.values() for places in phases.get("waiting", {}).items()
    ]
    norms = {phase: lines for phase, lines in waits if phase.startswith(("updating", "stepping"))}
    assert norms
    for phase, lines in norms.items():
        assert not [line for line in lines if "megatron/core/utils.py" in line], phase


def test_offloaded_activations_lower_the_peak_without_a_wait(simulated):
    kept, moved = simulated[KEPT], simulated[OFFLOADED]
    assert moved["waits"] == kept["waits"]
    # this recipe's critic recomputes nothing; its actor keeps only the inputs of layers, which are
    # fewer bytes than those that are brought back early
    assert moved["peaks"]["updating critic"] < 0.3 * kept["peaks"]["updating critic"]
    assert moved["peaks"]["updating actor"] < kept["peaks"]["updating actor"] + (64 << 20)


TRAINED = {f"{role} {part}" for role in ("actor", "critic") for part in TRAINED_PARTS}
HELD = {
    "computing old_log_prob with actor": {"actor weights", "critic weights"},
    "computing values with critic": TRAINED - {"actor gradients", "critic gradients"},
    "updating critic": TRAINED,
    "updating actor": TRAINED,
    "weight sync": {"actor weights"},
}
"""Parts of roles on the GPU by simulated phase, if all are offloaded that can be: those that it
uses, and those that come back for the next phase. The roles share a pipeline in the update, but not
in the forward passes."""


@pytest.mark.parametrize("phase", HELD)
def test_a_phase_holds_no_part_that_neither_it_nor_the_next_one_uses(phase, simulated):
    kept, moved = simulated[KEPT], simulated[MOVED]
    assert "error" not in moved, moved["stack"]
    parts = {part for parts in HELD.values() for part in parts}
    before, found = (
        {p: run["composition"][phase].get(p, 0) for p in parts} for run in (kept, moved)
    )
    assert {part for part, size in before.items() if size} == parts
    assert {part: size for part, size in found.items() if size} == {
        part: before[part] for part in HELD[phase]
    }
    assert moved["waits"].get(phase) == kept["waits"].get(phase)


def test_host_memory_has_what_left_the_gpu(simulated):
    held = simulated[KEPT]["held"]
    left = sum(size for part, size in held.items() if part.endswith(("weights", "moments")))
    assert simulated[KEPT]["pinned"] == 0
    assert simulated[MOVED]["pinned"] == pytest.approx(left, rel=0.01)


@pytest.mark.parametrize(("role", "share"), [("actor", 1.0), ("critic", 0.5)])
def test_the_hybrid_optimizer_keeps_a_share_of_the_moments_off_the_gpu(role, share, simulated):
    kept, hybrid = simulated[KEPT], simulated[HYBRID]
    assert "error" not in hybrid, hybrid["stack"]
    moments = kept["held"][f"{role} moments"]
    before, found = (
        sum(run["held"].get(f"{role} {part}", 0) for part in ("main weights", "moments"))
        for run in (kept, hybrid)
    )
    # Megatron goes on until it has the share: the last tensor may exceed it
    assert kept["held"][f"{role} main weights"] <= found <= before - share * moments


@pytest.mark.parametrize(("role", "share"), [("actor", 1.0), ("critic", 0.5)])
def test_a_checkpoint_brings_the_hybrid_optimizers_moments_back_to_where_they_were(
    role, share, simulated
):
    """Moments on the CPU with their values, those on the GPU with shape and device."""
    assert "error" not in simulated[RESUMED], simulated[RESUMED]["stack"]
    found = simulated[RESUMED][role]
    assert found["loaded"] == found["saved"] != found["built"]
    assert {row["main"][0] for row in found["loaded"]} == {"cuda"}
    sizes = {"cpu": 0, "cuda": 0}
    for row in found["loaded"]:
        device, *shape = row["exp_avg"][: len(row["main"])]
        assert shape == row["main"][1:]
        sizes[device] += math.prod(shape)
    assert sizes["cpu"] / sum(sizes.values()) == pytest.approx(share, abs=0.2)
    counters = found["counters"]
    assert found["counters loaded"] == counters
    assert counters["optimizer_step"] > 0
    assert found["counters built"]["optimizer_step"] == 0
    assert found["counters at the end"]["optimizer_step"] == 2 * counters["optimizer_step"]
    # the CPU's copies of weights are read again; weights on the simulated GPU are saved as zeros
    assert found["copies before"] > 0
    assert found["copies"] == 0


def test_the_plan_knows_what_a_reward_model_holds(simulated):
    found, phase = simulated[REWARDED], "computing scores with reward_model"
    assert "error" not in found, found["stack"]
    assert found["resident"] == pytest.approx(found["planned"], rel=0.02)
    assert found["planned"] > simulated[KEPT]["planned"]
    assert found["peaks"][phase] == pytest.approx(found["planned_peaks"][phase], rel=0.05)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", FULL)
def test_quick_mode_agrees_with_the_full_run(name, simulated):
    full, quick = simulated[f"full:{name}"], simulated[f"quick:{name}"]
    assert "error" not in full, full["stack"]
    assert quick["resident"] == pytest.approx(full["resident"], rel=0.01)
    for phase, peak in full["peaks"].items():
        assert quick["peaks"][phase] == pytest.approx(peak, rel=0.02), phase
    for phase, waits in full["waits"].items():
        assert quick["waits"][phase] == pytest.approx(waits, rel=0.05, abs=2), phase
        operations = full["operations"][phase]
        assert quick["operations"][phase] == pytest.approx(operations, rel=0.05, abs=5), phase


def test_targets_left_on_the_host_are_caught(simulated):
    error = simulated["mistake:targets_left_on_the_host"]["error"]
    assert "updating critic" in error
    assert "cpu and cuda:0" in error


def test_tokens_that_were_not_moved_are_caught(simulated):
    error = simulated["mistake:tokens_not_moved"]["error"]
    assert "computing old_log_prob with actor" in error
    assert "cuda:0 and cpu" in error


def test_a_gather_over_the_wrong_group_is_caught(simulated):
    error = simulated["mistake:weights_gathered_over_the_wrong_group"]["error"]
    assert "weight sync" in error
    assert "on each of 1 ranks is not" in error


def test_a_buffer_allocated_twice_is_caught(simulated):
    found = simulated["mistake:gradients_allocated_twice"]
    doubled = found["roles"]["actor"][1] + found["roles"]["critic"][1]
    assert found["resident"] == pytest.approx(found["planned"] + doubled, rel=0.02)
    assert found["resident"] > 1.02 * found["planned"]

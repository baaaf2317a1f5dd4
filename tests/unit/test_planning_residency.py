"""Who is where in which phase, which parts ``auto`` offloads, and whether a run fits."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from recipe_list import GPU_RECIPES
from test_recipe_checks import DENSE, models, recipe

from mppo.hub.builtin import read_model_config, resolve_model
from mppo.parallel.node import cgroup_limit
from mppo.planning.fit import (
    EVERYTHING,
    NOTHING,
    Fit,
    choose_offload,
    plan_fit,
    planned_residency,
)
from mppo.planning.host import ENGINE_PROCESS, PROCESS, host_issue, host_need, memory_warnings
from mppo.planning.outside import LEAST_SEQUENCES
from mppo.planning.residency import GENERATION, TRAINED_PARTS, residency
from mppo.planning.run_plan import plan_roles
from mppo.planning.verdict import EXIT_TOO_LARGE, judge, planned_moments
from mppo.recipe.errors import ConfigError
from mppo.recipe.gpu_types import GIB, GPU_TYPES, GpuType
from mppo.recipe.rules.rule import world_size_of
from mppo.recipe.sections.megatron import Offload
from mppo.train import main
from mppo.trainer.start.loading import load_checked

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes" / "configs"
KL, PP = "algorithm.use_kl_in_reward=true", "pipeline_model_parallel_size=2"
ONE_BY_ONE, TOGETHER = "trainer.schedule=sequential", f"actor.megatron.{PP} critic.megatron.{PP}"
FEW = "rollout.batch_size=32"
"""A server that generates no more sequences at a time than its KV cache must have room for."""
ALL = dict.fromkeys(("actor", "critic", "ref", "reward_model"), EVERYTHING)
APART = tuple(
    f"{role}.{key}"
    for role, pp in (("actor", 2), ("critic", 1))
    for key in (
        "megatron.tensor_model_parallel_size=8",
        f"megatron.pipeline_model_parallel_size={pp}",
        "megatron.recompute_granularity=full",
        "ppo_micro_batch_size_per_gpu=8",
    )
)
"""Actor TP8 x PP2, critic TP8: each is updated in a phase of its own."""
LARGE = "qwen2.5_32b_gsm8k_math"
"""The recipe that is tested with these layouts."""


def plans_of(path: Path, *overrides: str):
    """A shipped recipe with its roles, without weights."""

    def read(path):
        builtin = str(path).startswith("builtin:")
        return read_model_config(resolve_model(path) if builtin else CONFIGS / Path(path).name)

    found = load_checked(path, list(overrides), None, read, files=False)
    configs = {role.name: read(role.path) for role in found.roles()}
    return found, plan_roles(found, world_size_of(found), configs)


def fit_of(gpu: str | float, name: str, *overrides: str) -> Fit:
    """The fit of a shipped recipe on a type of GPU, or one with a number of GiB."""
    chosen = GPU_TYPES[gpu] if isinstance(gpu, str) else GpuType("GPU", int(gpu * GIB))
    return plan_fit(*plans_of(ROOT / "recipes" / f"{name}.yaml", *overrides), chosen)


def places(table, phase: str, where: str = "device") -> dict[str, str]:
    """Initials of the parts in a place, by role."""
    return {
        role: "".join(part[0] for part, place in parts.items() if place == where)
        for role, parts in table[phase].items()
    }


def test_roles_that_take_turns_have_phases_of_their_own():
    table = residency(recipe(KL, ONE_BY_ONE), ALL)
    found = {phase: places(table, phase) for phase in table}
    nobody = {"actor": "", "critic": "", "ref": ""}
    assert found == {
        "generation": nobody,
        "forward ref": nobody | {"ref": "p"},
        "forward actor": nobody | {"actor": "p"},
        "forward critic": nobody | {"critic": "p"},
        "update critic": nobody | {"critic": "pgo"},
        "update actor": nobody | {"actor": "pgo"},
        "weight sync": nobody | {"actor": "p"},
        "save": {"actor": "po", "critic": "po", "ref": ""},
    }
    away = table["generation"]
    assert away["critic"] == {"parameters": "host", "gradients": "freed", "optimizer": "host"}
    assert away["ref"] == {"parameters": "host"}


def test_roles_of_one_pipeline_are_there_together():
    table = residency(recipe(*TOGETHER.split()), ALL)
    assert list(table) == ["generation", "forward", "update", "weight sync", "save"]
    assert places(table, "forward") == {"actor": "p", "critic": "p"}
    assert places(table, "update") == {"actor": "pgo", "critic": "pgo"}


@pytest.mark.parametrize(
    ("settings", "phases"),
    [
        (f"{ONE_BY_ONE} trainer.align_overflow=true", ["update"]),
        (f"{ONE_BY_ONE} trainer.timeline.steps=[3]", ["update"]),
        ("algorithm.adv_estimator=grpo rollout.n=2", ["update actor"]),
        (f"actor.megatron.{PP}", ["update critic", "update actor"]),
    ],
    ids=["steps taken together", "recorded", "one role", "unequal pipelines"],
)
def test_an_update_is_divided_only_where_roles_take_turns(settings, phases):
    chosen = recipe(*settings.split())
    table = residency(chosen, ALL)
    assert [phase for phase in table if phase.startswith("update")] == phases


def test_a_reward_model_is_frozen_and_there_only_to_score():
    chosen = recipe(ONE_BY_ONE, "reward_model.path=builtin:tiny-reward")
    table = residency(chosen, ALL)
    assert list(table)[:3] == ["generation", "reward", "forward actor"]
    assert {phase: places(table, phase)["reward_model"] for phase in table} == {
        phase: "p" if phase == "reward" else "" for phase in table
    }
    assert set(places(table, "reward").values()) == {"p", ""}
    assert table["update actor"]["reward_model"] == {"parameters": "host"}


def test_an_actor_that_measures_nothing_has_no_forward_phase():
    bypass = recipe(ONE_BY_ONE, "algorithm.rollout_correction.bypass_mode=true")
    assert "forward actor" not in residency(bypass, ALL)


@pytest.mark.parametrize("chosen", list(product([False, True], repeat=3)))
def test_a_part_that_is_not_offloaded_never_moves(chosen):
    offload = Offload(**dict(zip(TRAINED_PARTS, chosen)))
    table = residency(recipe(ONE_BY_ONE), {"actor": offload, "critic": NOTHING})
    for phase in table:
        assert places(table, phase)["critic"] == "pgo"
        for part, moves in zip(TRAINED_PARTS, chosen):
            assert moves or table[phase]["actor"][part] == "device"


def test_the_gib_of_the_32b_recipe_by_phase():
    """Qwen2.5-32B on the critic's only and the actor's last stage, in bytes by hand."""
    every = "{parameters: true, gradients: true, optimizer: true}"
    fit = fit_of("h100-80gb", LARGE, *APART, f"actor.megatron.offload={every}",
                 f"critic.megatron.offload={every}")  # fmt: skip
    use = fit.uses[16]
    actor, critic = 2_048_033_792, 3_998_746_624  # parameters of TP8 x PP2 x DP2 and TP8 x DP4
    assert use.parts["actor"]["gradients"] == 4 * actor
    assert use.host(fit.table) == 2 * actor + 12 * actor // 2 + 2 * critic + 12 * critic // 4
    held = {one.name: sum(use.held(one, fit.table).values()) for one in use.uses}
    assert held["generation"] == 0
    assert held["building critic"] == 0, "the actor waits in host memory"
    assert held["weight sync"] == 2 * actor
    assert held["forward passes of actor"] == 2 * actor + 2 * critic, "the critic's come back"
    returning = 2 * actor + 12 * actor // 2
    assert held["updating critic"] == (2 + 4) * critic + 12 * critic // 4 + returning


def test_auto_offloads_the_least_that_fits():
    """The less memory, the more leaves; gradients, which nobody copies, leave first."""
    assert fit_of("h200-141gb", LARGE, *APART, FEW).offload == {"actor": NOTHING, "critic": NOTHING}
    gradients = Offload(gradients=True)
    both = {"actor": gradients, "critic": gradients}
    assert fit_of("h100-80gb", LARGE, *APART, FEW).offload == both
    copied = []
    for gib in (70, 60, 56, 50, 44):
        fit = fit_of(gib, LARGE, *APART, FEW)
        assert fit.verdict.fits, gib
        copied.append(fit.uses[16].host(fit.table))
    assert copied == sorted(copied)
    assert copied[0] < copied[-1]
    assert not fit_of(30, LARGE, *APART, FEW).verdict.fits


def test_auto_offloads_more_for_a_kv_cache_of_all_sequences():
    """As many as a server generates at once, or half of them, and so on."""
    counts = {}
    for gib in (79.2, 50, 44):
        fit = fit_of(gib, LARGE, *APART)
        assert fit.verdict.fits
        assert fit.engine is not None
        assert fit.verdict.kv_tokens >= fit.engine.sequences * 2048
        counts[gib] = fit.engine.sequences
    assert counts[79.2] == 1024 // 8
    assert counts[79.2] > counts[44] >= LEAST_SEQUENCES
    both = Offload(gradients=True, optimizer=True)
    assert fit_of("h100-80gb", LARGE, *APART).offload == {"actor": both, "critic": both}


@pytest.mark.parametrize("gib", [60, 50, 44])
def test_nothing_less_than_what_auto_offloads_would_fit(gib):
    fit = fit_of(gib, LARGE, *APART, FEW)
    chosen, _ = plans_of(ROOT / "recipes" / f"{LARGE}.yaml", *APART)
    moved = {(name, part) for name, offload in fit.offload.items()
             for part in TRAINED_PARTS if getattr(offload, part)}  # fmt: skip
    for name, part in moved:
        less = dict(fit.offload)
        less[name] = less[name].model_copy(update={part: False})
        table = residency(chosen, less)
        verdicts = [
            judge(planned_moments(use, table, fit.engine, table), chosen, fit.gpu, fit.engine)
            for use in fit.uses.values()
        ]
        assert not all(verdict.fits for verdict in verdicts), (name, part)


@pytest.mark.parametrize("gib", [46, 62])
def test_auto_chooses_for_the_rank_that_needs_most(gib):
    """What suffices for the last stage alone is too little for the first one here."""
    name = "deepseek_llm_7b_gsm8k_math"
    fit, (chosen, _) = fit_of(gib, name, FEW), plans_of(ROOT / "recipes" / f"{name}.yaml", FEW)
    assert [verdict.fits for verdict in fit.verdicts.values()] == [True, True]
    uses = list(fit.uses.values())
    for ranks in (uses, uses[::-1]):
        assert choose_offload(chosen, ranks, fit.engine, fit.gpu)[0] == fit.offload
    assert choose_offload(chosen, uses[1:], fit.engine, fit.gpu)[0] != fit.offload


def test_what_a_recipe_sets_is_not_chosen_anew():
    none = fit_of("h100-80gb", LARGE, *APART, "critic.megatron.offload=none",
                  "actor.megatron.offload={gradients: true}")  # fmt: skip
    assert none.offload == {"actor": Offload(gradients=True), "critic": NOTHING}
    shown = fit_of("h100-80gb", LARGE, *APART, "critic.megatron.offload=none",
                   "actor.megatron.offload=none").verdict  # fmt: skip
    assert not shown.fits
    assert any("critic.megatron.offload=auto" in fix for fix in shown.fixes)


def test_on_the_cpu_auto_offloads_nothing():
    given = recipe("actor.megatron.offload={optimizer: true}")
    table = planned_residency(given, 1, models(DENSE), None)
    found = places(table, GENERATION, "host")
    assert found == {"actor": "o", "critic": ""}


def test_a_kv_cache_that_is_too_small_does_not_fit():
    fit = fit_of("h100-80gb", LARGE, *APART,
                 "rollout.server_args={mem_fraction_static: 0.2}")  # fmt: skip
    assert fit.engine is not None
    assert fit.engine.sequences == LEAST_SEQUENCES
    verdict = fit.verdict
    assert verdict.over <= 0
    assert not verdict.fits
    assert "raise rollout.server_args.mem_fraction_static (0.2)" in verdict.fixes[0]


def test_roles_trained_together_may_be_trained_in_turn():
    fit = fit_of(60, "deepseek_llm_7b_gsm8k_cp2", "trainer.schedule=auto")
    assert not fit.verdict.fits
    assert any("trainer.schedule=sequential" in fix for fix in fit.verdict.fixes)


@pytest.mark.parametrize("gpu", ["a100-80gb", "h100-80gb"])
@pytest.mark.parametrize("path", GPU_RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_fits_80_gb_in_every_phase(path, gpu):
    fit = fit_of(gpu, path.stem)
    for verdict in fit.verdicts.values():
        assert verdict.fits, [*verdict.moments[:1], *verdict.fixes]


def test_the_host_memory_of_a_node_is_the_sum_of_its_ranks():
    every = "{parameters: true, gradients: true, optimizer: true}"
    chosen, plans = plans_of(
        ROOT / "recipes" / f"{LARGE}.yaml", *APART, f"actor.megatron.offload={every}",
        f"critic.megatron.offload={every}", "actor.ema_decay=0.99",
    )  # fmt: skip
    fit = plan_fit(chosen, plans, GPU_TYPES["h100-80gb"])
    need = host_need(chosen, plans, fit)
    assert need.parts["offloaded parts"] == 8 * max(u.host(fit.table) for u in fit.uses.values())
    assert need.parts["moving average"] == 8 * 4 * max(plans[0].stage_parameters)
    assert need.parts["ranks' processes"] == 8 * PROCESS
    assert need.parts["engine's processes"] == 8 * ENGINE_PROCESS
    assert host_issue(need, need.total, "physical memory") is None
    issue = host_issue(need, need.total - 1, "limit of the cgroup")
    assert issue is not None
    assert "limit of the cgroup" in str(issue)
    assert "trainer.async_save=false" in issue.fix


def test_a_run_is_warned_of_what_it_lacks_and_refused_what_cannot_be():
    every = "{parameters: true, gradients: true, optimizer: true}"
    chosen, plans = plans_of(
        ROOT / "recipes" / "qwen2_7b_rm.yaml", f"actor.megatron.offload={every}"
    )
    gpu, source = GPU_TYPES["h100-80gb"], "limit of the cgroup"
    assert memory_warnings(chosen, plans, gpu, 1000 * GIB, source) == []
    (lacking,) = memory_warnings(chosen, plans, GpuType("GPU", 40 * GIB), 1000 * GIB, source)
    assert "does NOT fit" in lacking
    (warned,) = memory_warnings(chosen, plans, gpu, 200 * GIB, source)
    assert "the host's memory = '200.0 GiB (limit of the cgroup)'" in warned
    with pytest.raises(ConfigError, match="offloaded parts"):
        memory_warnings(chosen, plans, gpu, 64 * GIB, source)
    (copied,) = memory_warnings(chosen, plans, None, 64 * GIB, source)
    assert copied.startswith("trainer.async_save: the copy of a checkpoint")


def test_offloaded_activations_take_host_memory():
    path = ROOT / "recipes" / "qwen2_7b_rm.yaml"
    chosen, plans = plans_of(path, "critic.megatron.offload_activations=true",
                             "critic.megatron.recompute_granularity=none")  # fmt: skip
    need = host_need(chosen, plans, plan_fit(chosen, plans, GPU_TYPES["h100-80gb"]))
    plain, plans = plans_of(path, "critic.megatron.recompute_granularity=none")
    kept = sum(plans[1].passes[0].layer(n).kept for n in range(28))
    assert need.parts["offloaded activations"] == 8 * int(kept)
    assert (
        "offloaded activations"
        not in host_need(plain, plans, plan_fit(plain, plans, GPU_TYPES["h200-141gb"])).parts
    )


def test_the_cpus_share_of_the_moments_is_in_host_memory():
    name = "qwen2_7b_rm"
    chosen, plans = plans_of(ROOT / "recipes" / f"{name}.yaml",
                             "critic.optim.cpu_offload_fraction=0.5")  # fmt: skip
    fit = plan_fit(chosen, plans, GPU_TYPES["h100-80gb"])
    half = plans[1].stage_parameters[0] // 4 // 2  # DP4
    before = fit_of("h100-80gb", name).uses[0].parts["critic"]["optimizer"]
    assert before - fit.uses[0].parts["critic"]["optimizer"] == 8 * half
    assert host_need(chosen, plans, fit).parts["optimizer on the CPU"] == 8 * 16 * half


def test_the_limit_of_the_cgroup_counts(tmp_path):
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert cgroup_limit(tmp_path) is None
    write("proc/self/cgroup", "0::/job/step\n")
    write("sys/fs/cgroup/job/step/memory.max", "max\n")
    assert cgroup_limit(tmp_path) is None
    write("sys/fs/cgroup/job/memory.max", f"{64 * GIB}\n")
    assert cgroup_limit(tmp_path) == 64 * GIB
    write("proc/self/cgroup", "9:cpu,cpuacct:/\n4:memory:/seen/outside\n0::/\n")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{32 * GIB}\n")
    assert cgroup_limit(tmp_path) == 32 * GIB


RECIPE = """
model: {path: "builtin:tiny"}
data: {task: arithmetic, max_prompt_length: 64, max_response_length: 64}
"""


def dry_run(tmp_path: Path, *options: str) -> int:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return main(["--config", str(path), "--dry-run", *options])


def test_a_dry_run_ends_with_a_verdict_and_a_picture(tmp_path, capsys):
    picture = tmp_path / "who.svg"
    assert dry_run(tmp_path, "--gpu", "a100-40gb", "--picture", str(picture)) == 0
    shown = capsys.readouterr().out
    assert "# memory by phase on NVIDIA A100-SXM4-40GB (39.38 GiB)" in shown
    assert "offloaded: actor nothing (auto); critic nothing (auto)" in shown
    assert shown.startswith("verdict: fits, with ")
    assert "\nfits, with" in shown
    assert "resolved recipe" not in shown
    text = picture.read_text()
    for word in ("generation", "weight sync", "actor optimizer", "critic gradients"):
        assert word in text


def test_a_dry_run_that_does_not_fit_says_so(tmp_path, capsys):
    assert dry_run(tmp_path, "trainer.gpu=0.5") == EXIT_TOO_LARGE
    shown = capsys.readouterr().out
    assert "does NOT fit" in shown
    assert shown.startswith("verdict: too large for 1 x ")
    assert "the GPU's memory; the plan ends with what would help" in shown.splitlines()[0]
    assert dry_run(tmp_path, "trainer.host_memory_gib=1") == EXIT_TOO_LARGE
    shown = capsys.readouterr().out
    assert "the host's memory = '1.0 GiB (trainer.host_memory_gib)'" in shown
    assert "the host's memory; the plan ends with what would help" in shown.splitlines()[0]
    assert "fits, with" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "h1000"], "did you mean h100-80gb?"),
        (["trainer.gpu=h1000"], "unknown GPU (did you mean h100-80gb?)"),
        (["trainer.gpu=-80"], "or give its memory in GiB, such as 79.2GiB"),
        (["trainer.gpu=true"], "is true or false, not a number"),
        (["trainer.gpu=[a]"], "trainer.gpu = ['a']"),
        (["trainer.host_memory_gib=0"], "give a value > 0"),
        (["--picture", "who.doc"], "--picture = 'who.doc'"),
        (["--picture", "/nowhere/who.svg"], "the folder /nowhere does not exist"),
    ],
)
def test_bad_options_of_a_dry_run(options, message, tmp_path, capsys):
    assert dry_run(tmp_path, *options) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""

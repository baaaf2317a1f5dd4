"""Any schedule computes and learns what Megatron's own schedules do, one role after the other."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layout_case import batch_of, run_cases
from megatron_schedules import megatron_schedules
from ordered_messages import ordered_messages

from mppo.report.html.timelines import newest_timelines

pytestmark = pytest.mark.timeout(2400)  # one fixture runs all cases, also on a loaded machine

COMMON = [
    "model.dtype=float32",
    "rollout.n=1",
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=4",
    "actor.shuffle=true",
    "actor.optim.lr=1e-2",
    "critic.optim.lr=1e-2",
    "actor.optim.eps=1e-2",
    "critic.optim.eps=1e-2",
    "actor.optim.clip_grad=0.1",
    "actor.use_kl_loss=true",
    "actor.entropy_coeff=0.01",
    "actor.ppo_micro_batch_size_per_gpu=1",
    "critic.ppo_micro_batch_size_per_gpu=1",
    "actor.ema_decay=0.9",
    "trainer.on_nonfinite=skip",
    "trainer.max_nonfinite_in_a_row=9",
]
SPOILED = 2
"""The iteration with a spoiled return."""
TP, PP = "megatron.tensor_model_parallel_size", "megatron.pipeline_model_parallel_size"
CP, EP = "megatron.context_parallel_size", "megatron.expert_model_parallel_size"
VPP = "megatron.virtual_pipeline_model_parallel_size"


def both(key: str) -> tuple[str, str]:
    """The same key for actor and critic."""
    return f"actor.{key}", f"critic.{key}"


OFFLOADED = (
    *both("megatron.offload.parameters=true"),
    *both("megatron.offload.gradients=true"),
    *both("megatron.offload.optimizer=true"),
    "ref.megatron.offload.parameters=true",
)


@dataclass(frozen=True)
class Update:
    """Updates to compare.

    Args:
        model: key of ``tiny_models.CONFIGS``; a shallow one has a layer in each chunk, which is all
            that a schedule needs.
        overrides: recipe keys besides ``COMMON``.
        kind: compared with "sequential".
        spoiled: a return is not finite in the second iteration, so that the critic skips a step.
        recorded: run folder in which all updates of that kind are recorded; None: not recorded.
        beside: the critic's model, where it has another one.
        offloaded: all parts of the roles leave the device in the phases that do not use them.
        messages: "by order": with NCCL's rules (``ordered_messages``); "after waits": besides,
            each pass waits for all messages that have begun; None: gloo's.
        iterations: how many updates follow one another; each takes several optimizer steps.
    """

    model: str
    overrides: tuple[str, ...]
    kind: str = "flush_free"
    spoiled: bool = False
    recorded: str | None = None
    beside: Update | None = None
    offloaded: bool = False
    messages: str | None = None
    iterations: int = 1


PP2 = both(f"{PP}=2")
VPP2 = (*PP2, *both(f"{VPP}=2"))
TWICE = both("ppo_epochs=2")
"""For one case of each schedule: a second epoch is only two mini-batches more."""
SIZES = (
    "actor.ppo_micro_batch_size_per_gpu=2",
    "critic.use_dynamic_bsz=true",
    "critic.ppo_max_token_len_per_gpu=30",
)
BALANCED = both("megatron.moe_router_load_balancing_type=aux_loss")
MOVING = both("megatron.moe_router_bias_update_rate=0.01")
CASES = {
    "PP2, a fused schedule": Update("qwen2_shallow", (*PP2, *TWICE), kind="fused", iterations=2),
    "PP2, sequential, recorded": Update(
        "qwen2_shallow", (*PP2, *TWICE), kind="sequential", recorded="sequential", iterations=2
    ),
    "PP2, recorded": Update("qwen2_shallow", (*PP2, *TWICE), recorded="flush_free", iterations=2),
    "PP4": Update("qwen2", both(f"{PP}=4")),
    "PP2, critic of half the depth": Update("qwen2", PP2, beside=Update("qwen2_shallow", ())),
    "PP2, a skipped step": Update("qwen2_shallow", PP2, spoiled=True, iterations=3),
    "PP2, a step skipped together": Update(
        "qwen2_shallow",
        (*PP2, "trainer.align_overflow=true"),
        kind="fused",
        spoiled=True,
        iterations=3,
    ),
    "PP2, offloaded": Update("qwen2_shallow", PP2, offloaded=True, iterations=2),
    "PP2, a skipped step, offloaded": Update(
        "qwen2_shallow", PP2, spoiled=True, offloaded=True, iterations=3
    ),
    "PP1, bfloat16, offloaded": Update(
        "qwen2_shallow", ("model.dtype=bfloat16",), offloaded=True, iterations=2
    ),
    "PP1, no distributed optimizer, offloaded": Update(
        "qwen2_shallow",
        both("megatron.use_distributed_optimizer=false"),
        kind="fused",
        offloaded=True,
        iterations=2,
    ),
    "MoE, EP2xPP2, bfloat16, offloaded": Update(
        "qwen3_moe_shallow",
        (*PP2, *both(f"{EP}=2"), "model.dtype=bfloat16"),
        offloaded=True,
        iterations=2,
    ),
    "PP1, actor TP2": Update("qwen2_shallow", (f"actor.{TP}=2",)),
    "actor TP2xPP2, critic PP2": Update("qwen2_shallow", (*PP2, f"actor.{TP}=2")),
    "PP2, gradients and weights in the background, offloaded": Update(
        "qwen2",
        (
            *PP2,
            *both("megatron.overlap_grad_reduce=true"),
            *both("megatron.overlap_param_gather=true"),
        ),
        offloaded=True,
        iterations=2,
    ),
    "PP2, no distributed optimizer": Update(
        "qwen2_shallow", (*PP2, *both("megatron.use_distributed_optimizer=false"))
    ),
    "CP2xPP2": Update("qwen2_shallow", (*PP2, *both(f"{CP}=2"))),
    "tied embeddings, TP2xPP2": Update("qwen2_tied_shallow", (*PP2, *both(f"{TP}=2"))),
    "micro-batches of other sizes": Update("qwen2_shallow", (*PP2, *SIZES)),
    "full recomputation": Update("qwen2", (*PP2, "actor.megatron.recompute_granularity=full")),
    "MoE, EP2xPP2": Update(
        "qwen3_moe_shallow",
        (*PP2, *both(f"{EP}=2"), *BALANCED, *both("megatron.moe_aux_loss_coeff=0.01")),
    ),
    "VPP2xPP2, a fused schedule": Update("qwen2", VPP2, kind="fused"),
    "VPP2xPP2, sequential, recorded": Update(
        "qwen2", (*VPP2, *TWICE), kind="sequential", recorded="interleaved", iterations=2
    ),
    "VPP2xPP2, a plain critic": Update("qwen2", (*PP2, f"actor.{VPP}=2")),
    "tied embeddings, VPP2xPP2, gradients reduced in the background": Update(
        "qwen2_tied", (*VPP2, *both("megatron.overlap_grad_reduce=true"))
    ),
    "MoE, VPP2xEP2xPP2": Update("qwen3_moe", (*VPP2, *both(f"{EP}=2"), *BALANCED)),
    "PP2, messages by their order": Update("qwen2_tied_shallow", PP2, messages="by order"),
    "PP2, waits for all messages, recorded": Update(
        "qwen2_shallow", (*PP2, *TWICE), messages="after waits", recorded="waiting", iterations=2
    ),
    "PP4, waits for all messages": Update("qwen2", both(f"{PP}=4"), messages="after waits"),
    "VPP2xPP2, recorded, messages by their order": Update(
        "qwen2", (*VPP2, *TWICE), messages="by order", recorded="in order", iterations=2
    ),
    "MLA and MoE with moving biases, TP2xPP2": Update(
        "moonlight", (*PP2, *both(f"{TP}=2"), *MOVING, "actor.router_replay=R2")
    ),
}


_sequential: dict[Update, dict] = {}
"""Results of Megatron's schedules on this rank, which cases of the same updates share."""


def updated(case: Update, folder: Path, registry) -> dict:
    """Results of all updates on this rank, by the case's schedule and by Megatron's."""
    same = replace(case, kind="sequential", recorded=None, offloaded=False, messages=None)
    if same not in _sequential:
        with megatron_schedules():
            _sequential[same] = _updates(same, "sequential", folder, registry)
    expected = _sequential[same]
    if case.recorded is not None:
        recorded = f"trainer.timeline={{steps: {list(range(1, case.iterations + 1))}}}"
        where = f"trainer.default_local_dir={folder / case.recorded}"
        case = replace(case, overrides=(*case.overrides, recorded, where))
    if case.offloaded:
        case = replace(case, overrides=(*case.overrides, *OFFLOADED))
    emulation = nullcontext()
    if case.messages is not None:
        emulation = ordered_messages(device_waits=case.messages == "after waits")
    with emulation as communicators:
        found = _updates(case, case.kind, folder, registry)
    counts = None
    if communicators is not None:
        counts = used_and_counted(communicators, registry.of(found["layout"]))
    shared = shared_message_groups(registry)
    return {"expected": expected, "found": found, "shared": shared, "communicators": counts}


def used_and_counted(communicators, groups) -> tuple[list[set], list[set]]:
    """Communicators of messages that each rank used, and those that the memory plan counts."""
    from mppo.pipeline.routes import routes

    layout, here = groups.layout, groups.coordinates.pp
    stride = layout.world // layout.pp
    counted = {
        (getattr(groups, way.group).group_name, groups.rank + (way.peer - here) * stride)
        for way in routes(here, layout.pp, layout.vpp)
    }
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (communicators.pairs, counted))
    used, counts = zip(*everywhere, strict=True)
    return list(used), list(counts)


KINDS_OF_MESSAGES = {"pp", "pp_back", "pp_wrap", "pp_wrap_back"}


def shared_message_groups(registry) -> list[tuple[str, str]]:
    """Groups of messages between stages that something else uses, too, in the layouts so far."""
    uses: dict[int, set[str]] = {}
    messages: dict[int, str] = {}
    for groups in registry._by_layout.values():
        own = {name: value for name, value in vars(groups).items() if name in KINDS_OF_MESSAGES}
        for name, value in (groups._state | own).items():
            if (isinstance(value, dist.ProcessGroup) and value is not groups.pp) or name == "pp":
                uses.setdefault(id(value), set()).add(name)
        if groups.layout.pp > 1:
            messages |= {id(value): name for name, value in own.items() if value is not None}
    return [(name, str(uses[group])) for group, name in messages.items() if len(uses[group]) > 1]


def _updates(case: Update, kind: str, folder: Path, registry) -> dict:
    from mppo.recipe.schedule_kind import streams_forward

    roles, experience_of = _begin(case, kind, folder, registry)
    metrics = []
    for step in range(1, case.iterations + 1):
        update = _update_phase(roles, experience_of(), step)
        if case.spoiled and step == SPOILED:
            returns_T = update.experience.returns_T
            returns_T[update.experience.old.batch.response_mask_T.nonzero()[0]] = torch.inf
        assert update.kind == kind
        update.run()
        metrics.append(update.metrics() | {"skipped": roles.skipped_steps})
    streamed = streams_forward(roles.recipe)
    assert streamed == (kind != "sequential" and roles.actor.layout.pp > 1)
    return {
        "metrics": metrics,
        "state": _state(roles),
        "in_a_row": roles.skipped_in_a_row,
        "layout": roles.actor.layout,
    }


def _begin(case: Update, kind: str, folder: Path, registry):
    """New roles, and what makes an experience of a batch by the roles as they are."""
    from mppo.batch.shares import share_out
    from mppo.hub.builtin import read_model_config
    from mppo.recipe.load import load_recipe
    from mppo.trainer.advantages import estimate
    from mppo.trainer.forward_phase import ForwardPhase
    from mppo.trainer.run_roles import Roles

    overrides = [*COMMON, f"model.path={folder / case.model}", *case.overrides]
    if case.beside is not None:
        overrides.append(f"critic.path={folder / case.beside.model}")
    recipe = load_recipe(None, [*overrides, f"trainer.schedule={kind}"])
    torch.manual_seed(0)
    roles = Roles(recipe, folder / case.model, read_model_config, registry, case.iterations)
    batch = share_out(replace(batch_of(8), scores_B=torch.sin(torch.arange(8.0))))

    def experience_of():
        forward = ForwardPhase(roles, batch)
        for together in forward.passes:
            forward.compute(together)
        return estimate(forward.outputs(), recipe.algorithm, 0.1)

    return roles, experience_of


def _update_phase(roles, experience, step: int):
    from mppo.trainer.update.update_stage import UpdatePhase

    return UpdatePhase(roles, experience, step, actor_frozen=False)


def _state(roles) -> list[dict[str, torch.Tensor]]:
    """Weights, averages and the last gradients of this rank's part, from every rank."""
    mine = {}
    for name, role in roles.trained.items():
        for i, stage in enumerate(role.stages):
            for key, value in stage.state_dict().items():
                if isinstance(value, torch.Tensor):
                    mine[f"{name} {i} {key}"] = value.detach().clone()
            for key, parameter in stage.named_parameters():
                mine[f"{name} {i} gradient of {key}"] = parameter.main_grad.clone()
                if role.weights.average is not None:
                    average = role.weights.average.of_parameters()[id(parameter)]
                    mine[f"{name} {i} average of {key}"] = average.clone()
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    return everywhere


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedules")
    found = dict(zip(CASES, run_cases(list(CASES.values()), 4, folder, updated)))
    return found | {"folder": folder}


@pytest.mark.parametrize("name", CASES)
def test_same_gradients_metrics_and_weights(name, outcomes):
    expected, found, shared, communicators = outcomes[name].values()
    assert not shared, "NCCL pairs the messages of a group by their order alone"
    if communicators is not None:
        used, counted = communicators
        assert used == counted, "the memory plan counts other communicators"
    for there, here in zip(expected["metrics"], found["metrics"], strict=True):
        there, here = (
            {k: v for k, v in m.items() if not k.startswith("perf/")} for m in (there, here)
        )
        assert here == pytest.approx(there, rel=0, abs=0, nan_ok=True)
    for there, here in zip(expected["state"], found["state"], strict=True):
        assert there.keys() == here.keys()
        different = [key for key, value in there.items() if not torch.equal(here[key], value)]
        assert not different
    assert expected["in_a_row"] == found["in_a_row"]
    skipped = [metrics["skipped"] for metrics in found["metrics"]]
    assert (skipped[0], skipped[-1] > 0) == (0, CASES[name].spoiled)


@pytest.mark.parametrize(
    ("run", "chunks"), [("sequential", 1), ("flush_free", 1), ("interleaved", 2)]
)
def test_a_recorded_update_is_a_trace_with_its_plan(run, chunks, outcomes):
    found = outcomes["folder"] / run / "timeline"
    assert sorted(path.name for path in found.iterdir()) == [f"step_{n}.json" for n in (1, 2)]
    events = json.loads((found / "step_2.json").read_text())["traceEvents"]
    done = [e["name"] for e in events if e["ph"] == "X" and e["pid"] == 3]
    # two epochs of two mini-batches, of two micro-batches on each of two data-parallel ranks
    assert sum(name.startswith("backward actor") for name in done) == 8 * chunks
    assert [name for name in done if name.startswith("step critic")][-1] == "step critic 3"
    timeline, _ = newest_timelines(outcomes["folder"] / run, 2)
    assert timeline["schedule"] == ("sequential" if chunks > 1 else run)
    plan, real = ([len(flat) // 3 for _, flat in panel["rows"]] for panel in timeline["panels"])
    assert len(plan) * 2 == len(real) == 4
    assert real[3] == sum(name != "waiting" for name in done)
    # of a stage: forward and backward of all micro-batches of both roles, as measured
    passes = [name for name in done if name.startswith(("forward", "backward"))]
    assert plan[1] == len(passes)


def left_between_steps(case: Update, folder: Path, registry) -> dict:
    """An update that one rank is asked to leave, and another one of the same models after it."""
    from mppo.supervision import stop_request
    from mppo.supervision.stop_request import StepInterrupted

    roles, experience_of = _begin(case, case.kind, folder, registry)
    update = _update_phase(roles, experience_of(), 1)
    stop_request.reset(within_s=0, patience_s=0)
    if dist.get_rank() == 1:
        stop_request.request()
    with pytest.raises(StepInterrupted) as left:
        update.run()
    assert left.value.half_done
    stop_request.reset()
    known = [len(one.norms) for one in update.updates]
    total = [len(one.mini_batches) for one in update.updates]
    after = _update_phase(roles, experience_of(), 2)
    after.run()
    return {"known": known, "total": total, "metrics": after.metrics()}


def failing_update(folder: Path, failing_rank: int) -> None:
    """An update of two interleaved stages; one rank fails at the actor's second mini-batch."""
    from mppo.parallel import device

    device.prepare_megatron()
    from mppo.parallel.groups import GroupRegistry

    roles, experience_of = _begin(Update("qwen2", VPP2), "flush_free", folder, GroupRegistry())
    update = _update_phase(roles, experience_of(), 1)
    actor = update.updates[-1]
    objective_of = actor.objective_of

    def fail(outputs, indices):
        raise ValueError("no such answer")

    fail.statistics = ()

    def fail_at_the_second(sequences: tuple[int, ...], plan):
        objective = objective_of(sequences, plan)
        is_second = sequences == tuple(actor.mini_batches[1])
        return fail if is_second and dist.get_rank() == failing_rank else objective

    actor.objective_of = fail_at_the_second
    update.run()


@pytest.mark.parametrize("kind", ["flush_free", "fused"])
def test_an_update_that_one_rank_would_leave_is_left_by_all_with_no_message_on_its_way(
    kind, tmp_path
):
    cases = [Update("qwen2", PP2, kind), Update("qwen2", VPP2, kind)]
    for outcome in run_cases(cases, 4, tmp_path, left_between_steps):
        assert 0 < sum(outcome["known"]) < sum(outcome["total"])
        assert all(math.isfinite(value) for value in outcome["metrics"].values())

"""Balanced token budgets: equal on all ranks, corrected by times, kept by a resumed run; the
numbers stay those of any other micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layout_case import run_cases
from test_schedules import PP2, Update, _begin, _state, _update_phase, both

UPDATES = 4
BUDGETS = (*PP2, *both("use_dynamic_bsz=true"), "actor.ppo_max_token_len_per_gpu=24")
SMALLER = Update("qwen2_shallow", ())


def balanced(case: Update, folder: Path, registry) -> dict:
    """Four updates with a critic's budget that is balanced, and that is a number."""
    auto, fixed = (_run(budget, folder, registry) for budget in ("auto", "15"))
    resumed = _roles("auto", folder, registry)[0]
    start = dict(resumed.slot_balance.budgets)
    resumed.load_state_dict(auto["state"])
    other = _roles("auto", folder, registry, "actor.ppo_max_token_len_per_gpu=30")[0]
    began = dict(other.slot_balance.budgets)
    other.load_state_dict(auto["state"])
    used = {name: role.token_budget for name, role in resumed.trained.items()}
    mine = [auto["budgets"], start, used]
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    return {
        "auto": auto, "fixed": fixed, "ranks": everywhere, "start": start, "resumed": used,
        "began": began, "other": other.slot_balance.budgets,
    }  # fmt: skip


def _roles(budget: str, folder: Path, registry, *more: str):
    keys = (*BUDGETS, f"critic.ppo_max_token_len_per_gpu={budget}", *more)
    return _begin(Update("qwen2", keys, beside=SMALLER), "flush_free", folder, registry)


def _run(budget: str, folder: Path, registry) -> dict:
    roles, experience_of = _roles(budget, folder, registry)
    if roles.slot_balance is not None:
        _slow_the_critic(roles.slot_balance)
    metrics, budgets, counts, first = [], [], [], None
    for step in range(1, UPDATES + 1):
        budgets.append({name: role.token_budget for name, role in roles.trained.items()})
        update = _update_phase(roles, experience_of(), step)
        batch = update.experience.old.batch
        counts.append(
            {u.role.name: u.planned(batch, u.mini_batches[0]).micro_batches for u in update.updates}
        )
        update.run()
        metrics.append(update.metrics())
        first = first or _state(roles)
    return {
        "metrics": metrics, "budgets": budgets, "counts": counts, "first": first,
        "state": roles.state_dict(),
    }  # fmt: skip


def _slow_the_critic(balance) -> None:
    """Replace the recorded durations, which are the machine's: the critic's actions take twice as
    long as the actor's."""
    correct = balance.after_update

    def after_update(events, tokens) -> None:
        seconds = {"actor": 1.0, "critic": 2.0}
        found = [replace(e, start=0.0, waited=0.0, end=seconds[e.action.role]) for e in events]
        correct(found, tokens)

    balance.after_update = after_update


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("balanced")
    case = Update("qwen2", BUDGETS, beside=SMALLER)
    (found,) = run_cases([case], 4, folder, balanced)
    return found


def test_measured_times_correct_the_budgets_after_the_second_update(outcome):
    first, second, third, fourth = outcome["auto"]["budgets"]
    assert first == second == outcome["start"]
    assert first["actor"] == third["actor"] == fourth["actor"] == 24
    assert third["critic"] < first["critic"]
    assert all(ranks == outcome["ranks"][0] for ranks in outcome["ranks"])
    told = outcome["auto"]["metrics"][-1]
    assert told["perf/token_budget/critic"] == outcome["resumed"]["critic"]
    assert "perf/token_budget/critic" not in outcome["fixed"]["metrics"][-1]


def test_a_balanced_critic_has_fewer_and_larger_micro_batches(outcome):
    auto, fixed = (outcome[kind]["counts"][0] for kind in ("auto", "fixed"))
    assert auto["critic"] < fixed["critic"]
    assert auto["actor"] == fixed["actor"]


def test_a_resumed_run_goes_on_with_the_budgets_unless_they_are_of_another_start(outcome):
    told = outcome["auto"]["metrics"][-1]  # by measured times: perhaps those of the start again
    for name in ("actor", "critic"):
        assert outcome["resumed"][name] == told[f"perf/token_budget/{name}"]
    assert outcome["other"] == outcome["began"]


def test_gradients_metrics_and_weights_are_those_of_a_fixed_budget(outcome):
    auto, fixed = outcome["auto"], outcome["fixed"]
    for here, there in zip(auto["first"], fixed["first"], strict=True):
        assert here.keys() == there.keys()
        for key, value in there.items():
            torch.testing.assert_close(
                here[key], value, rtol=1e-5, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}"
            )
    for here, there in zip(auto["metrics"], fixed["metrics"], strict=True):
        here, there = ({k: v for k, v in m.items() if "perf/" not in k} for m in (here, there))
        assert here == pytest.approx(there, rel=1e-4, abs=1e-5)

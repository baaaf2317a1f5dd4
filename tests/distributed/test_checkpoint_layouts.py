"""A checkpoint is taken up under any layout and world size, optimizer included."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from layout_case import Case, batch_of, build_role, objective, run_cases

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
DP2 = {}
PLAIN = {"use_distributed_optimizer": False}
EP2 = {"expert_model_parallel_size": 2}
STEPS = 2


@dataclass(frozen=True)
class Step(Case):
    """Train ``STEPS`` steps, from the checkpoint ``resume`` if named; save as ``save`` if named."""

    save: str = ""
    resume: str = ""
    dtype: str = "float32"
    role: dict = field(default_factory=dict)


class _Counter:
    """A part of the run with a state."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def checkpointer(role, root: Path, said: list[str], part=None, **trainer):
    from mppo.checkpoint.checkpointer import Checkpointer
    from mppo.config.schema import TrainerConfig
    from mppo.parallel.signals import StopRequest

    parts = {"counter": part or _Counter()}
    settings = TrainerConfig(**{"async_save": False, **trainer})
    return Checkpointer(settings, root, {"actor": role}, parts, {}, StopRequest(), said.append)


def train(role, steps: int) -> None:
    from mppo.parallel.schedule import update_schedule

    batch = batch_of()
    lengths = batch.lengths_B.tolist()
    plan = update_schedule(lengths, role.shape(measuring=False), [range(len(lengths))])[0]
    for _ in range(steps):
        role.optimizer.advance()
        role.forward_backward(batch, plan.microbatches, objective(batch))
        role.optimizer_step()


def run_step(case: Step, folder: Path, registry) -> dict[str, torch.Tensor]:
    """The case's weights, under HF names, at its end."""
    role, counter, done = build_role(case, folder, registry), _Counter(), 0
    if case.resume:
        done = checkpointer(role, folder / case.resume, [], counter).resume()
        assert (done, counter.value) == (STEPS, STEPS)
        assert role.optimizer.schedule.num_steps == STEPS
    train(role, STEPS)
    if case.save:
        counter.value = done + STEPS
        checkpointer(role, folder / case.save, [], counter).save(done + STEPS, {})
    return {name: tensor.clone() for bucket in role.hf_weights(1 << 16) for name, tensor in bucket}


def undisturbed(case: Step, folder: Path, registry) -> dict[str, torch.Tensor]:
    role = build_role(case, folder, registry)
    train(role, 2 * STEPS)
    return {name: tensor.clone() for bucket in role.hf_weights(1 << 16) for name, tensor in bucket}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


MODELS = {
    "qwen2": (TP2, [TP2, PP2, VPP2, DP2, PLAIN]),
    "gemma2": (PP2, [TP2, DP2]),
    "qwen2_moe": (EP2, [EP2, TP2, PP2, DP2]),
    "moonlight": ({**EP2, **TP2}, [{**EP2}, PP2]),
}


@pytest.mark.parametrize("head", ["policy", "value"])
def test_two_ranks_resume_in_every_other_layout(tmp_path, head):
    models = MODELS if head == "policy" else {"qwen2": MODELS["qwen2"]}
    cases, names = [], []
    for model, (first, others) in models.items():
        whole = Step(model, first, head=head)
        cases.append(replace(whole, save=model))
        cases += [replace(whole, megatron=other, resume=model) for other in others]
        names += [(model, other) for other in [None, *others]]
    outcomes = run_cases(cases, 2, tmp_path, run_step)
    plain = [Step(model, first, head=head) for model, (first, _) in models.items()]
    (tmp_path / "whole").mkdir()
    expected = dict(zip(models, run_cases(plain, 2, tmp_path / "whole", undisturbed)))
    for (model, layout), outcome in zip(names, outcomes):
        if layout is None:
            continue
        difference = largest_difference(outcome, expected[model])
        same = layout == models[model][0]
        assert difference == 0 if same else difference < 1e-6, (model, layout, difference)


def test_the_world_may_grow_and_shrink(tmp_path):
    four = {**TP2, **PP2}
    two = Step("qwen2", PP2)
    start = run_cases([replace(two, save="first")], 2, tmp_path, run_step)
    grown = [
        Step("qwen2", four, resume="first", save="second"),
        Step("qwen2", {**TP2}, resume="first"),
    ]
    after = run_cases(grown, 4, tmp_path, run_step)
    (tmp_path / "whole").mkdir()
    (expected,) = run_cases([two], 2, tmp_path / "whole", undisturbed)
    assert largest_difference(start[0], expected) > 1e-3
    for outcome in after:
        assert largest_difference(outcome, expected) < 1e-6

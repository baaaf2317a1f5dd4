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
    """The case's weights, under HF names, at its end; undisturbed where it saves nothing."""
    role, counter, done = build_role(case, folder, registry), _Counter(), 0
    if case.resume:
        done = checkpointer(role, folder / case.resume, [], counter).resume()
        assert (done, counter.value) == (STEPS, STEPS)
        assert role.optimizer.schedule.num_steps == STEPS
    train(role, STEPS if case.save or case.resume else 2 * STEPS)
    if case.save:
        counter.value = done + STEPS
        checkpointer(role, folder / case.save, [], counter).save(done + STEPS, {})
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


@pytest.mark.extended
@pytest.mark.parametrize(
    ("model", "head"), [*((model, "policy") for model in MODELS), ("qwen2", "value")]
)
def test_two_ranks_resume_in_other_layouts(tmp_path, model, head):
    first, others = MODELS[model]
    whole = Step(model, first, head=head)
    cases = [whole, replace(whole, save="saved")]
    cases += [replace(whole, megatron=layout, resume="saved") for layout in others]
    expected, _, *resumed = run_cases(cases, 2, tmp_path, run_step)
    for layout, outcome in zip(others, resumed):
        difference = largest_difference(outcome, expected)
        assert difference == 0 if layout == first else difference < 1e-6, (layout, difference)


@pytest.mark.extended
def test_the_world_may_grow_and_shrink(tmp_path):
    two, again = Step("qwen2", PP2), tmp_path / "again"
    by_two, by_four = str(tmp_path / "by_two"), str(tmp_path / "by_four")
    expected, start = run_cases([two, replace(two, save=by_two)], 2, tmp_path, run_step)
    four = [Step("qwen2", {**TP2, **PP2}, resume=by_two), Step("qwen2", TP2, save=by_four)]
    after, _ = run_cases(four, 4, tmp_path, run_step)
    again.mkdir()
    (shrunk,) = run_cases([Step("qwen2", TP2, resume=by_four)], 2, again, run_step)
    assert largest_difference(start, expected) > 1e-3
    for outcome in (after, shrunk):
        assert largest_difference(outcome, expected) < 1e-6

"""A checkpoint can be resumed in any layout and world size, optimizer included."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest
import torch
from layout_case import Case, batch_of, build_role, objective, run_cases, train_step
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
DP2 = {}
PLAIN = {"use_distributed_optimizer": False}
EP2 = {"expert_model_parallel_size": 2}
STEPS = 2


@dataclass(frozen=True)
class Step(Case):
    """Train ``2 STEPS`` steps: with a save as ``save`` halfway, or from there on by ``resume``."""

    save: str = ""
    resume: str = ""


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
    from mppo.recipe.sections.trainer import TrainerConfig
    from mppo.supervision.stop_request import StopRequest

    parts = {"counter": part or _Counter()}
    settings = TrainerConfig(**{"async_save": False, **trainer})
    return Checkpointer(settings, root, {"actor": role}, parts, {}, StopRequest(), said.append)


def resume(role, root: Path, said: list[str], part=None, **trainer) -> int:
    """Resume this role from the checkpoints under ``root``."""
    from mppo.checkpoint.resume import choose
    from mppo.checkpoint.role_state import describe_role

    saver = checkpointer(role, root, said, part, **trainer)
    models = {"actor": describe_role(role)}
    return saver.resume(choose(saver.trainer, root, models, said.append))


def train(role, steps: int) -> None:
    from mppo.batch.mini_batch import MiniBatch

    batch = batch_of()
    plan = role.plan(batch, training=True)
    for _ in range(steps):
        role.optimizer.advance()
        train_step(role, MiniBatch(batch, plan, objective(batch)))


def run_step(case: Step, folder: Path, registry) -> dict[str, torch.Tensor]:
    """The weights, under HF names, at the end of the case."""
    role, counter = build_role(case, folder, registry), _Counter()
    if case.resume:
        done = resume(role, folder / case.resume, [], counter)
        assert (done, counter.value) == (STEPS, STEPS)
        assert role.optimizer.schedule.num_steps == STEPS
    else:
        train(role, STEPS)
        counter.value = STEPS
        checkpointer(role, folder / case.save, [], counter).save(STEPS, {})
    train(role, STEPS)
    return {
        name: tensor.clone() for bucket in role.weights.stream(1 << 16) for name, tensor in bucket
    }


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


TRIED = {
    ("qwen2", "policy"): (TP2, [TP2, PP2, VPP2, DP2, PLAIN]),
    ("qwen2", "value"): (TP2, [PP2]),
    ("gemma2", "policy"): (PP2, [TP2, DP2]),
    ("qwen2_moe", "policy"): (EP2, [EP2, TP2, PP2, DP2]),
    ("moonlight", "policy"): ({**EP2, **TP2}, [{**EP2}, PP2]),
}
"""By model and head: the layout that saves, and those that resume."""
ROUNDED = {"TP2": TP2, "DP2": DP2, "state not sharded": PLAIN}
"""Layouts that save and resume bfloat16 parameters, whose float32 main weights must come along."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def two_ranks(folder) -> dict[tuple[str, str] | str, list[dict[str, torch.Tensor]]]:
    """By model and head, or name of a bfloat16 case: the run that saved, then those that resumed,
    all in one group of two."""
    cases = []
    for (model, head), (first, others) in TRIED.items():
        name = f"{model} {head}"
        cases.append(Step(model, first, head=head, save=name))
        cases += [Step(model, layout, head=head, resume=name) for layout in others]
    for name, layout in ROUNDED.items():
        cases.append(Step("qwen2", layout, save=name, dtype="bfloat16"))
        cases.append(Step("qwen2", layout, resume=name, dtype="bfloat16"))
    outcomes = iter(run_cases(cases, 2, folder, run_step))
    found = {key: [next(outcomes) for _ in range(1 + len(TRIED[key][1]))] for key in TRIED}
    return found | {name: [next(outcomes), next(outcomes)] for name in ROUNDED}


@pytest.mark.parametrize(("model", "head"), TRIED)
def test_two_ranks_resume_in_other_layouts(two_ranks, folder, model, head):
    expected, *resumed = two_ranks[model, head]
    first, others = TRIED[model, head]
    initial = load_file(folder / model / "model.safetensors")
    learned = {
        name: (initial[name] - expected[name]).abs().max() for name in expected.keys() & initial
    }
    assert max(learned.values()) > 1e-3
    for layout, outcome in zip(others, resumed, strict=True):
        difference = largest_difference(outcome, expected)
        assert difference == 0 if layout == first else difference < 1e-6, (layout, difference)


@pytest.mark.parametrize("name", ROUNDED)
def test_bfloat16_parameters_resume_bitwise_from_float32_weights(two_ranks, name):
    expected, resumed = two_ranks[name]
    assert {tensor.dtype for tensor in expected.values()} == {torch.bfloat16}
    assert largest_difference(resumed, expected) == 0


def test_replicated_tensors_are_written_once_and_writing_is_divided_over_ranks(two_ranks, folder):
    saved = FileSystemReader(folder / "qwen2_moe policy" / f"global_step_{STEPS}" / "actor")
    metadata = saved.read_metadata()
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            assert sum(prod(chunk.sizes) for chunk in entry.chunks) == prod(entry.size), key
    writers = {
        place.relative_path.split("_")[2]
        for index, place in metadata.storage_data.items()
        if not index.fqn.startswith("optimizer.") and "experts" not in index.fqn
    }
    assert writers == {"0", "1"}, "the dense weights, which both ranks hold"


def test_the_world_may_grow_and_shrink(two_ranks, folder):
    expected = two_ranks["qwen2", "policy"][0]
    four = [
        Step("qwen2", {**TP2, **PP2}, resume="qwen2 policy"),
        Step("qwen2", TP2, save="by four"),
    ]
    grown, of_four = run_cases(four, 4, folder, run_step)
    (shrunk,) = run_cases([Step("qwen2", resume="by four")], 1, folder, run_step)
    for outcome in (grown, of_four, shrunk):
        assert largest_difference(outcome, expected) < 1e-6

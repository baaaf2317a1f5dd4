"""The exchanges of tensor parallelism that a predicted step counts are those of two real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layout_case import Case, batch_of, build_role, objective, run_cases
from planned_time import Peak, role_load
from tiny_models import CONFIGS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mppo.planning.time.role_load import TRAINER, RolePasses, StepSequences

MODEL = "qwen3"
EXCHANGES = ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")
"""Operations of gathers and scatters; on a CPU, a scatter that is waited for is an all-to-all."""


class Exchanges(TorchDispatchMode):
    """Record the elements of the whole tensor of each gather and scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name.removeprefix("c10d::") in EXCHANGES:
            tensors = [x for x in tree_leaves(args[:2]) if isinstance(x, torch.Tensor)]
            self.sizes.append(max(x.numel() for x in tensors))
        return function(*args, **(kwargs or {}))


class Unit(Peak):
    """Every exchange takes a second, and nothing else runs meanwhile."""

    def __init__(self) -> None:
        super().__init__(beside=False)

    def collective(self, kind, nbytes, ranks):
        return 1.0


def issued(case: Case, folder: Path, registry) -> tuple[list[int], list[int], int]:
    """Sizes of the exchanges of a pass over one micro-batch: forward, training; its tokens."""
    from mppo.batch.mini_batch import MiniBatch
    from mppo.models.streamed_role import forward, forward_backward

    role, batch = build_role(case, folder, registry), batch_of()
    measuring, training = (role.plan(batch, training) for training in (False, True))
    assert len(measuring) == len(training) == 1
    with Exchanges() as measured:
        forward(role, batch, measuring)
    role.optimizer.advance()
    with Exchanges() as trained:
        forward_backward(role, MiniBatch(batch, training, objective(batch)))
    return measured.sizes, trained.sizes, len(batch.tokens_T)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By head: what two tensor-parallel ranks issue."""
    layout = {"tensor_model_parallel_size": 2}
    heads = ("policy", "value")
    cases = [Case(MODEL, layout, head=head, micro_batch=100) for head in heads]
    return dict(zip(heads, run_cases(cases, 2, tmp_path_factory.mktemp("ranks"), run=issued)))


@pytest.mark.parametrize(("head", "role"), [("policy", "actor"), ("value", "critic")])
def test_predicted_exchanges_are_those_of_two_ranks(found, head, role):
    measured, trained, tokens = found[head]
    config = CONFIGS[MODEL]()
    load = role_load(config, role, world=2, tp=2)
    passes = RolePasses(Unit(), load, StepSequences(7, 5, 6, 11))
    forward, backward = passes.training_forward[0].network, passes.training_backward[0].network
    # other exchanges reduce gradients and bring outputs to the ranks that hold the sequences
    padded = tokens + tokens % 2
    hidden, values = padded * config.hidden_size, padded
    assert passes.forward[0].network / TRAINER == pytest.approx(
        measured.count(hidden) + measured.count(values)
    )
    assert (forward + backward) / TRAINER == pytest.approx(
        trained.count(hidden) + trained.count(values)
    )
    assert measured.count(values) == (head == "value")

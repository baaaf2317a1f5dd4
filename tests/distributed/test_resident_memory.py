"""The memory that a role keeps between steps is allocated when the role is built.

Servers on the same device start after that, and divide the memory that is free by then.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from layout_case import Case, batch_of, build_role, objective, run_cases, train_step
from torch import Tensor

DISTRIBUTED = {"use_distributed_optimizer": True}
CASES = {
    "float32": Case("qwen2", {"use_distributed_optimizer": False}),
    "bfloat16": Case("qwen2", {"use_distributed_optimizer": False}, dtype="bfloat16"),
    "distributed optimizer": Case("qwen2", DISTRIBUTED, dtype="bfloat16"),
    "experts over ranks": Case(
        "qwen2_moe", {**DISTRIBUTED, "expert_model_parallel_size": 2}, dtype="bfloat16"
    ),
}


def optimizer_bytes(role) -> int:
    """Bytes of the moments and of all other tensors in the optimizers' states on this rank."""
    return sum(
        value.nbytes
        for part in role.optimizer.parts
        for state in part.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def before_and_after(case: Case, folder: Path, registry) -> tuple[int, int, int]:
    """Elements that the optimizer updates; bytes of its state when built, and after a step."""
    from mppo.batch.mini_batch import MiniBatch

    role, batch = build_role(case, folder, registry), batch_of()
    elements = sum(p.numel() for part in role.optimizer.parts for p in part.get_parameters())
    built = optimizer_bytes(role)
    role.optimizer.advance()
    mini_batch = MiniBatch(batch, role.plan(batch, training=True), objective(batch))
    _, result = train_step(role, mini_batch)
    assert result.applied
    return elements, built, optimizer_bytes(role)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, tuple[int, int, int]]:
    folder = tmp_path_factory.mktemp("resident")
    return dict(zip(CASES, run_cases(list(CASES.values()), 2, folder, run=before_and_after)))


@pytest.mark.parametrize("name", CASES)
def test_the_first_step_allocates_no_moments(found, name):
    elements, built, after = found[name]
    assert built == after == 2 * 4 * elements > 0

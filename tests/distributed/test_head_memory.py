"""Neither the forward pass nor training of a role holds the logits of all positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layout_case import Case, batch_of, build_role, objective, run_cases
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SEQUENCES, LONGEST = 40, 40
CHUNK = 7
VOCABULARY = 4096
FLOAT = 4


class LargestTensor(TorchDispatchMode):
    """Record the largest storage, in bytes, of any operation's result."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result


def largest(case: Case, folder: Path, registry) -> dict[str, int]:
    """Bytes of the largest tensor in the forward and backward passes over one micro-batch."""
    from mppo.batch.mini_batch import MiniBatch
    from mppo.models.streamed_role import forward, forward_backward

    role = build_role(case, folder, registry)
    batch = batch_of(SEQUENCES, LONGEST)
    measuring, training = (role.plan(batch, training) for training in (False, True))
    assert len(measuring) == len(training) == 1
    found = {}
    with LargestTensor() as seen:
        forward(role, batch, measuring)
    found["measuring"] = seen.bytes
    role.optimizer.advance()
    with LargestTensor() as seen:
        forward_backward(role, MiniBatch(batch, training, objective(batch)))
    found["training"] = seen.bytes
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[int, dict[str, int]]:
    """Bytes by positions in a chunk of the head."""
    chunks = (CHUNK, 1 << 20)
    cases = [Case("qwen2_wide", micro_batch=SEQUENCES, chunk=chunk) for chunk in chunks]
    return dict(zip(chunks, run_cases(cases, 1, tmp_path_factory.mktemp("head"), run=largest)))


@pytest.mark.parametrize("pass_", ["measuring", "training"])
def test_the_head_holds_logits_of_a_chunk_at_a_time(found, pass_):
    positions = int(batch_of(SEQUENCES, LONGEST).response_mask_T.sum())
    logits = positions * VOCABULARY * FLOAT
    in_chunks, at_once = found.values()
    assert at_once[pass_] >= logits, "what is looked for can be seen"
    assert in_chunks[pass_] < logits / 4

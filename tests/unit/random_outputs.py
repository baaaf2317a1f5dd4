"""Random batches with log-probabilities and values, for tests of the trainer."""

from __future__ import annotations

import torch

from mppo import register
from mppo.batch.batch import Batch
from mppo.batch.outputs import Outputs
from mppo.recipe.sections.algorithm import Rejection

ESTIMATORS = register.estimator.own


REJECTIONS = ("off", *Rejection.__args__)


def outputs_of(lengths, scores=None, seed=0, prompt=1, samples=2):
    """Random measurements of responses of the given lengths, ``samples`` to a prompt."""
    generator = torch.Generator().manual_seed(seed)
    count = len(lengths)
    cu_seqlens = torch.tensor([0, *(prompt + n for n in lengths)]).cumsum(0)
    pieces = [torch.tensor([0.0] * prompt + [1.0] * n) for n in lengths]
    mask = torch.cat(pieces) if pieces else torch.zeros(0)

    def random():
        return torch.randn(len(mask), generator=generator) * mask

    if scores is None:
        scores = torch.randn(count, generator=generator)
    batch = Batch(
        tokens_T=torch.arange(len(mask)),
        cu_seqlens=cu_seqlens,
        response_mask_T=mask,
        rollout_logprobs_T=-random().abs(),
        group_B=torch.arange(count) // samples,
        scores_B=torch.as_tensor(scores, dtype=torch.float32),
        parts_B=torch.as_tensor(scores, dtype=torch.float32)[:, None],
        truncated_B=torch.arange(count) % 2 == 1,
        weight_version_T=torch.zeros(int(cu_seqlens[-1]), dtype=torch.int64),
    )
    return Outputs(batch, -random().abs(), -random().abs(), random())

"""Our statistics beside those of TRL's own PPO trainer, where that package is installed."""

from __future__ import annotations

import pytest
import torch

from mppo.algos.masked import masked_mean, masked_var, masked_whiten


@pytest.mark.parametrize("seed", range(4))
def test_masked_statistics_are_those_of_trl(seed):
    theirs = pytest.importorskip(
        "trl.experimental.ppo.ppo_trainer", reason="the optional package trl (1.12) is missing"
    )
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(5, 40, generator=random) * 3 + 1
    mask = torch.rand(5, 40, generator=random) < 0.6
    x, inside = values.flatten(), mask.flatten().float()
    close = torch.testing.assert_close
    close(masked_mean(x, inside), theirs.masked_mean(values, mask))
    close(masked_var(x, inside), theirs.masked_var(values, mask))
    for shift in (True, False):
        expected = theirs.masked_whiten(values, mask, shift_mean=shift)[mask]
        close(masked_whiten(x, inside, shift_mean=shift)[mask.flatten()], expected)

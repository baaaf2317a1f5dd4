"""What a simulated rank knows about the micro-batches of other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mppo_simulate.expert_choices import tokens_of_a_router
from mppo_simulate.inputs import longest_batch

from mppo.hub.model_config import ModelConfigs
from mppo.models.attention.context import ContextPlace
from mppo.models.microbatch import cut
from mppo.parallel.layout import Layout
from mppo.trainer.start.loading import load_checked

RECIPE = Path(__file__).parents[3] / "recipes" / "qwen2_7b_rm.yaml"
SMALL = ("data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "rollout.n=1",
         "data.max_prompt_length=5", "data.max_response_length=90")  # fmt: skip


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("multiple", [1, 2, 8])
def test_the_number_of_tokens_on_every_rank_is_that_of_its_micro_batch(cp, multiple):
    configs = ModelConfigs(RECIPE)
    batch = longest_batch(load_checked(RECIPE, SMALL, None, configs.read, files=False), uneven=True)
    lengths, mask_T = batch.lengths_B.tolist(), torch.ones(len(batch.tokens_T))
    assert len(set(lengths)) > 3
    layout = Layout(world=8, tp=multiple if 8 % (multiple * cp) == 0 else 1, cp=cp)
    for sequences in ([], [0], [3, 5], [1, 2, 4, 7]):
        planned = tokens_of_a_router([lengths[i] for i in sequences], layout, multiple)
        for rank in range(cp):
            place = ContextPlace(cp, rank) if cp > 1 else None
            made = cut(batch, sequences, multiple, mask_T, place)
            assert planned * multiple == len(made.tokens_t)

"""Cases for ``mppo-replay`` that earlier versions wrote."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from random_outputs import outputs_of
from safetensors.torch import load_file, save_file

from mppo.batch.outputs import Experience
from mppo.dumps.experience_files import named_tensors
from mppo.recipe.sections.algorithm import AlgorithmConfig
from mppo.trainer.advantages import estimate
from mppo.trainer.update.case_replay import CASE, load_case

FILE = "experience.safetensors"
BATCH = (
    "tokens_T", "cu_seqlens", "response_mask_T", "rollout_logprobs_T", "group_B", "scores_B",
    "truncated_B", "weight_version_T", "routed_experts_T", "end_mask_T",
)  # fmt: skip
NAMES = (
    *(f"batch.{name}" for name in BATCH), "old.logprobs_T", "old.ref_logprobs_T", "old.values_T",
    "rewards_T", "advantages_T", "returns_T", "loss_weight_T",
)  # fmt: skip
"""The tensors of a case before the batch was shared out."""


def write_earlier(folder: Path) -> Experience:
    """Write a case as an earlier version did: one file, no number of ranks."""
    experience = estimate(outputs_of([3, 0, 5]), AlgorithmConfig(), 0.0)
    tensors = named_tensors(experience)
    save_file({name: tensors[name].clone() for name in NAMES}, folder / FILE)
    case = {"step": 4, "mini_batch": [2, 0], "model": "m", "recipe": {}}
    (folder / CASE).write_text(json.dumps(case))
    return experience


def test_a_case_of_an_earlier_version_is_read(tmp_path):
    experience = write_earlier(tmp_path)
    case, found = load_case(tmp_path)
    assert (case.step, case.mini_batch, case.model) == (4, [2, 0], "m")
    expected = named_tensors(experience)
    assert {f.name for f in fields(Experience)} - {"old"} <= expected.keys()
    for name, tensor in named_tensors(found).items():
        known = expected[name] if name != "batch.parts_B" else torch.empty(3, 0)  # it had none
        assert torch.equal(tensor, known), name


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("old.values_T", lambda x: x[:-1], "old.values_T has 10 rows, not 11"),
        ("batch.scores_B", lambda x: x[:-1], "batch.scores_B has 2 rows, not 3"),
        ("batch.cu_seqlens", lambda x: x.flip(0), "does not divide the tokens"),
        ("batch.cu_seqlens", lambda x: x[:0], "does not divide the tokens"),
        ("batch.cu_seqlens", lambda x: x.view(1, -1), "does not divide the tokens"),
    ],
)
def test_a_damaged_case_of_an_earlier_version_is_refused(name, change, message, tmp_path):
    write_earlier(tmp_path)
    tensors = load_file(tmp_path / FILE)
    save_file(tensors | {name: change(tensors[name]).contiguous()}, tmp_path / FILE)
    with pytest.raises(ValueError, match=message):
        load_case(tmp_path)

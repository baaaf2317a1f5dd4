"""The critic's calibration: metrics of a step, and the report's plot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from random_outputs import outputs_of

from mppo.batch.outputs import Experience
from mppo.recipe.sections.algorithm import AlgorithmConfig
from mppo.report.history import History
from mppo.report.pictures import calibration_lines, plot_calibration
from mppo.trainer.advantages import estimate
from mppo.trainer.metrics import calibration

VALUE, RETURN = "critic/calibration/value/", "critic/calibration/return/"
ERROR = "critic/calibration/error"


def experience_of(values: torch.Tensor, returns: torch.Tensor) -> Experience:
    """Three responses, of 20, 30 and 50 tokens, with these values and returns on their tokens."""
    outputs = outputs_of([20, 30, 50], scores=[1.0, 0.0, 2.0])
    inside_T = outputs.batch.response_mask_T > 0
    values_T, returns_T = torch.full((2, len(inside_T)), 77.0)
    values_T[inside_T], returns_T[inside_T] = values, returns
    experience = estimate(replace(outputs, values_T=values_T), AlgorithmConfig(), 0.0)
    return replace(experience, returns_T=returns_T)


def test_each_tenth_of_the_tokens_has_its_mean_value_and_return():
    values = torch.randperm(100, generator=torch.Generator().manual_seed(0)).float()
    found = calibration(experience_of(values, 2 * values), "token")
    expected = {f"{VALUE}{tenth}": 10 * tenth + 4.5 for tenth in range(10)}
    expected |= {f"{RETURN}{tenth}": 20 * tenth + 9.0 for tenth in range(10)}
    assert found == pytest.approx(expected | {ERROR: 49.5})


def test_equal_values_are_one_group_and_an_empty_group_has_no_metric():
    found = calibration(experience_of(torch.zeros(100), torch.ones(100)), "token")
    assert found == pytest.approx({f"{VALUE}5": 0.0, f"{RETURN}5": 1.0, ERROR: 1.0})
    # 80 tokens of the value 0, whose middle is at 0.4, and 20 of the value 1, at 0.9
    values = torch.tensor([0.0] * 80 + [1.0] * 20)
    found = calibration(experience_of(values, values), "token")
    groups = {f"{VALUE}4": 0.0, f"{RETURN}4": 0.0, f"{VALUE}9": 1.0, f"{RETURN}9": 1.0}
    assert found == pytest.approx({**groups, ERROR: 0.0})


def test_a_picture_is_written_only_where_there_is_a_critic(tmp_path):
    runs = History(None)
    for step in range(1, 11):
        row = {f"{VALUE}{k}": k / 10 for k in range(10)}
        runs.append(step, row | {f"{RETURN}{k}": k * step / 100 for k in range(10)})
    lines = calibration_lines(runs)
    assert [step for step, *_ in lines] == [1, 4, 7, 10]
    assert lines[-1][1] == lines[-1][2] == [k / 10 for k in range(10)]
    plot_calibration(runs, tmp_path / "values.png", "run")
    assert (tmp_path / "values.png").read_bytes().startswith(b"\x89PNG")
    plot_calibration(History(None), tmp_path / "none.png", "run")

"""Losses, estimators and rejections against numbers of verl's own functions (verl_losses.json).

The file names verl's commit and the day on which its functions computed the numbers, in float64.
"""

import json
from pathlib import Path

import pytest
import torch
from mppo_migrate.verl_keys.translation import VerlTranslation

from mppo import register
from mppo.algos.group_baselines import OutcomeOptions, gdpo
from mppo.algos.masked import masked_whiten
from mppo.algos.policy_loss import LossInputs, importance_ratio
from mppo.algos.rollout_correction import (
    icepop,
    importance_weights,
    rejection_mask,
    truncate_weights,
)
from mppo.algos.token_baseline import path_variance, token_baseline
from mppo.recipe.document import apply_overrides
from mppo.recipe.load import load_recipe

NUMBERS = json.loads((Path(__file__).parent / "verl_losses.json").read_text())
INSIDE = torch.tensor(NUMBERS["mask"]) > 0
MASK = torch.ones(int(INSIDE.sum()), dtype=torch.float64)
CU = torch.tensor([0, *INSIDE.sum(1).tolist()]).cumsum(0)


def flat(rows):
    """The response tokens of verl's padded rows, one sequence after the other."""
    return torch.tensor(rows, dtype=torch.float64)[INSIDE]


def weights_of(log_ratio, level, threshold):
    """verl's weights: an upper bound truncates, ``lower_upper`` is IcePop."""
    weights = importance_weights(log_ratio, MASK, CU, level)
    lower, _, upper = threshold.rpartition("_")
    return icepop(weights, float(upper), float(lower)) if lower else truncate_weights(
        weights, float(upper)
    )  # fmt: skip


def inputs_of(name, new, old):
    """The inputs of a loss, and its name, from the name of a recorded case."""
    loss_mode, *options = name.split()
    ratio, log_ratio = importance_ratio(new, old)
    chosen = {}
    if loss_mode.startswith("dppo"):
        chosen = dict(zip(("low", "high", "dual_clip"), map(float, options)))
    elif loss_mode == "dro":
        chosen = {"dro_beta": float(options[0])}
    elif options[0] != "None":
        chosen = {"importance_T": weights_of((new - old).detach(), *options)}
    advantages = flat(NUMBERS["advantages"])
    none = torch.zeros_like(MASK)
    return loss_mode, LossInputs(
        new, old, ratio, log_ratio, advantages, MASK, CU, selected_T=none, **chosen
    )


@pytest.mark.parametrize("name", NUMBERS["losses"])
def test_a_loss_equals_verls_in_value_and_gradient(name):
    want = NUMBERS["losses"][name]
    new = flat(NUMBERS["new"]).requires_grad_()
    loss_mode, inputs = inputs_of(name, new, flat(NUMBERS["old"]))
    loss, clipped, bounded = register.policy_loss[loss_mode](inputs)
    (gradient,) = torch.autograd.grad(loss.mean(), new)
    assert loss.mean().item() == pytest.approx(want["loss"], abs=1e-9)
    torch.testing.assert_close(gradient, flat(want["gradient"]), rtol=0, atol=1e-9)
    if loss_mode.startswith("dppo"):
        metrics = want["metrics"]
        assert clipped.mean().item() == pytest.approx(metrics["actor/pg_clipfrac"])
        assert bounded.mean().item() == pytest.approx(metrics["actor/pg_clipfrac_lower"])


@pytest.mark.parametrize("by_std", [True, False])
def test_pass_at_k_equals_verls(by_std):
    want = NUMBERS["passk"]
    formula = register.estimator["grpo_passk"]
    scores = torch.tensor(want["scores"], dtype=torch.float64)
    found = formula(scores, torch.tensor(want["group"]), scores, OutcomeOptions(by_std=by_std))
    expected = torch.tensor(want[str(by_std)], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_pass_at_k_of_ties_and_of_one_response_is_0():
    formula = register.estimator["grpo_passk"]
    scores, group = torch.tensor([1.0, 1.0, 0.0, 5.0]), torch.tensor([3, 3, 3, 9])
    assert formula(scores, group, scores, OutcomeOptions()).tolist() == [0, 0, 0, 0]


def rows_of(table, mask):
    """The response tokens of padded rows with a given mask, one sequence after the other."""
    return torch.tensor(table, dtype=torch.float64)[mask > 0]


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("weights", [None, [1.0, 0.25]])
def test_gdpo_equals_verls(by_std, weights):
    """verl computes in float32 here."""
    want = NUMBERS["gdpo"]
    mask, group = torch.tensor(want["mask"]), torch.tensor(want["group"])
    parts = torch.tensor(list(want["parts"].values()), dtype=torch.float64).T
    advantages = gdpo(parts, group, torch.tensor(weights or [1.0, 1.0]), by_std)
    lengths = mask.sum(1).long()
    found = masked_whiten(
        advantages.repeat_interleave(lengths), torch.ones(int(mask.sum())).double()
    )
    expected = rows_of(want[f"{by_std} {weights}"], mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_token_baselines_equal_verls_and_their_definition(name, weighed):
    want = NUMBERS["token_baselines"]
    padded = torch.tensor(want["mask"], dtype=torch.float64)
    rows = {key: torch.tensor(want[key], dtype=torch.float64) for key in
            ("rewards", "logprobs", "squares", "importance")}  # fmt: skip
    # as in a batch: from each sequence's first to its last response token, without padding
    spans = [int(row.nonzero()[-1]) + 1 if row.sum() else 0 for row in padded]
    places = torch.cat([torch.arange(span) for span in spans])
    mask, *flat_rows = (
        torch.cat([row[:span] for row, span in zip(table, spans)])
        for table in (padded, *rows.values())
    )
    rewards, logprobs, squares, importance = flat_rows
    cu = torch.tensor([0, *spans]).cumsum(0)
    if name.startswith("tir"):
        places = torch.cat([row[:s].long().cumsum(0) - 1 for row, s in zip(padded, spans)])
    variance = path_variance(logprobs, squares, importance if weighed else None)
    group, held = torch.tensor(want["group"]), torch.arange(len(spans))
    advantages, returns = token_baseline(rewards, variance, mask, places, cu, group, held)
    expected = want[f"{name} weighed" if weighed else name]
    found = {"advantages": advantages, "returns": returns}
    for key, found_T in found.items():
        expected_N = rows_of(expected[key], padded)
        torch.testing.assert_close(found_T[mask > 0], expected_N, rtol=0, atol=1e-9)
        assert (found_T[mask == 0] == 0).all()
    # the definition at one position: the second of the first group's three responses
    energy = (1 - 2 * rows["logprobs"].exp() + rows["squares"]) * (
        rows["importance"] ** 2 if weighed else 1
    )
    path = (energy * padded)[:3].cumsum(1)
    to_go = (rows["rewards"] * padded)[:3].flip(1).cumsum(1).flip(1)
    if name == "optimal_token_baseline":  # the third response's second token is not its own
        path, to_go = path[:2], to_go[:2]
        second = (to_go * path)[:, 1].sum() / path[:, 1].sum()
    else:
        at = [(0, 1), (1, 1), (2, 2)]
        second = sum(to_go[i] * path[i] for i in at) / sum(path[i] for i in at)
    assert advantages[1].item() == pytest.approx((to_go[0, 1] - second).item(), abs=1e-7)


@pytest.mark.parametrize("name", NUMBERS["rejections"])
def test_chained_rejections_equal_verls(name):
    kinds, thresholds = name.split()
    settings = (
        f"algorithm.rollout_correction.rollout_rs={kinds}",
        (f"algorithm.rollout_correction.rollout_rs_threshold='{thresholds}'"),
    )  # as on verl's command line
    document, _ = apply_overrides({}, settings)
    recipe = load_recipe(VerlTranslation(document).document)
    kept = MASK
    log_ratio = flat(NUMBERS["old"]) - flat(NUMBERS["engine"])
    for kind, upper, lower in recipe.algorithm.rollout_correction.rejections():
        kept = kept * rejection_mask(log_ratio, MASK, CU, kind, upper, lower)
    assert kept.tolist() == flat(NUMBERS["rejections"][name]).tolist()

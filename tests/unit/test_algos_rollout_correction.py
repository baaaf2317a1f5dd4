"""Importance weights and rejections for the gap between engine and actor."""

import math

import pytest
import torch

from mppo.algos import rollout_correction as rc
from mppo.algos.masked import merged_moments, sequence_moments

# two sequences: tokens 0..2 and 3..4; the last token of the first is not a response token
CU = torch.tensor([0, 3, 5])
MASK = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
D = torch.log(torch.tensor([2.0, 0.5, 9.0, 4.0, 2.0]))


def correction_metrics(*tensors):
    return rc.correction_metrics(rc.correction_statistics(*tensors))


def weight_metrics(weights, mask):
    moments = sequence_moments(weights, mask, torch.tensor([0, len(mask)]))
    masked = ((weights == 0) & (mask > 0)).sum() / mask.sum().clamp(min=1.0)
    return rc.weight_metrics(merged_moments(moments), float(masked))


def test_token_and_sequence_weights_by_hand():
    token = rc.importance_weights(D, MASK, CU, "token")
    torch.testing.assert_close(token, torch.tensor([2.0, 0.5, 0.0, 4.0, 2.0]))
    sequence = rc.importance_weights(D, MASK, CU, "sequence")
    torch.testing.assert_close(sequence, torch.tensor([1.0, 1.0, 0.0, 8.0, 8.0]))


def test_truncation_and_icepop_by_hand():
    weights = rc.importance_weights(D, MASK, CU, "token")
    assert rc.truncate_weights(weights, 2.0).tolist() == [2.0, 0.5, 0.0, 2.0, 2.0]
    assert rc.truncate_weights(weights, 2.0, 1.0).tolist() == [2.0, 1.0, 0.0, 2.0, 2.0]
    masked = rc.icepop(weights, 3.0, 1.0)
    torch.testing.assert_close(masked, torch.tensor([2.0, 0.0, 0.0, 0.0, 2.0]))


def test_normalised_weights_have_mean_one():
    weights = rc.importance_weights(D, MASK, CU, "token")
    normalised = rc.normalize_weights(weights, MASK, CU, "token")
    assert normalised.sum().item() == pytest.approx(4.0)
    sequence = rc.importance_weights(D, MASK, CU, "sequence")
    normalised = rc.normalize_weights(sequence, MASK, CU, "sequence")
    # means over sequences: (1 + 8) / 2
    torch.testing.assert_close(normalised[3], torch.tensor(8 / 4.5))
    assert rc.normalize_weights(MASK * 0, MASK, CU, "token").sum() == 0


@pytest.mark.parametrize(
    ("kind", "upper", "lower", "kept"),
    [
        # k1 = -d: log of 1/2, 2, 1/4, 1/2
        ("token_k1", 2.5, None, [1, 1, 0, 0, 1]),
        ("token_k1", 1.5, 0.2, [1, 0, 0, 1, 1]),
        # k2 = d^2 / 2: 0.24, 0.24, 0.96, 0.24
        ("token_k2", 0.5, None, [1, 1, 0, 0, 1]),
        # k3 = exp(d) - 1 - d: 0.307, 0.193, 1.61, 0.307
        ("token_k3", 0.25, None, [0, 1, 0, 0, 0]),
        # sums of k1: 0, -log 8
        ("seq_sum_k1", 2.0, None, [1, 1, 0, 0, 0]),
        ("seq_sum_k1", 10.0, None, [1, 1, 0, 1, 1]),
        # means of k2: 0.24, 0.6
        ("seq_mean_k2", 0.5, None, [1, 1, 0, 0, 0]),
        ("geometric", 2.0, None, [1, 1, 0, 0, 0]),
        ("seq_max_k3", 0.5, None, [1, 1, 0, 0, 0]),
        ("seq_max_k1", 2.5, None, [1, 1, 0, 0, 0]),
    ],
)
def test_rejections_by_hand(kind, upper, lower, kept):
    assert rc.rejection_mask(D, MASK, CU, kind, upper, lower).tolist() == kept


def test_a_vetoed_token_rejects_its_sequence():
    log_ratio = torch.tensor([0.0, -12.0, 0.0, 0.0, 0.0])
    assert rc.veto_mask(log_ratio, MASK, CU, 1e-4).tolist() == [0, 0, 0, 1, 1]
    outside = torch.tensor([0.0, 0.0, -12.0, 0.0, 0.0])
    assert rc.veto_mask(outside, MASK, CU, 1e-4).tolist() == MASK.tolist()


def test_equal_policies_give_weight_one_and_reject_nothing():
    zero = torch.zeros(5)
    assert rc.importance_weights(zero, MASK, CU, "sequence").tolist() == MASK.tolist()
    for kind in ("token_k1", "seq_sum_k2", "seq_mean_k3", "seq_max_k1", "geometric"):
        assert rc.rejection_mask(zero, MASK, CU, kind, 1.001, None).tolist() == MASK.tolist()


def test_huge_gaps_and_empty_batches_stay_finite():
    for log_ratio in (torch.full((5,), 1e5), torch.full((5,), -1e5)):
        for level in ("token", "sequence"):
            weights = rc.importance_weights(log_ratio, MASK, CU, level)
            assert torch.isfinite(weights).all()
        metrics = correction_metrics(log_ratio - 1, torch.full((5,), -1.0), MASK, CU)
        assert all(math.isfinite(value) for value in metrics.values()), metrics
    nothing = torch.zeros(0)
    metrics = correction_metrics(nothing, nothing, nothing, torch.tensor([0, 0]))
    metrics |= weight_metrics(nothing, nothing)
    assert all(math.isfinite(value) for value in metrics.values())
    for kind in ("token_k1", "seq_max_k3", "geometric"):
        assert len(rc.rejection_mask(nothing, nothing, torch.tensor([0, 0]), kind, 2, None)) == 0


def test_metrics_by_hand():
    logprobs = torch.log(torch.tensor([0.5, 0.5, 1.0, 0.8, 0.4]))
    metrics = correction_metrics(logprobs, logprobs - D, MASK, CU)
    mean_d = math.log(2 * 0.5 * 4 * 2) / 4
    assert metrics["rollout_corr/kl"] == pytest.approx(-mean_d, abs=1e-6)
    k3 = sum(w - 1 - math.log(w) for w in (2, 0.5, 4, 2)) / 4
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(k3, abs=1e-6)
    ppl = (2.0 + (0.8 * 0.4) ** -0.5) / 2
    assert metrics["rollout_corr/training_ppl"] == pytest.approx(ppl, rel=1e-5)
    chi2 = (4 + 0.25 + 16 + 4) / 4 - 1
    assert metrics["rollout_corr/chi2_token"] == pytest.approx(chi2, rel=1e-5)
    weights = weight_metrics(torch.tensor([1.0, 3.0, 0.0]), torch.tensor([1.0, 1.0, 0.0]))
    assert weights["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(0.8)
    assert weights["rollout_corr/rollout_is_mean"] == 2.0


def test_wrong_names_list_the_valid_ones():
    with pytest.raises(ValueError, match="token or sequence"):
        rc.importance_weights(D, MASK, CU, "word")
    with pytest.raises(ValueError, match="geometric"):
        rc.rejection_mask(D, MASK, CU, "token_k4", 2.0, None)

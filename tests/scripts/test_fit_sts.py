"""Sequential temperature scaling finds the factors by which synthetic confidences are wrong."""

import pytest
import torch

from headrace.scripts.fit_sts import BINS, calibration_error, fit, survival_errors


def test_the_error_is_the_mean_distance_of_claim_and_frequency() -> None:
    right = torch.tensor([True, True, True, False])
    assert calibration_error(torch.full((4,), 0.75), right) == pytest.approx(0.0)
    assert calibration_error(torch.full((4,), 0.5), right) == pytest.approx(0.25)
    # two bins: claimed 1.0 against 1/2, claimed 0.0 against 1
    claims = torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert calibration_error(claims, right) == pytest.approx((0.5 * 2 + 1.0 * 2) / 4)
    assert BINS == 15


def test_overconfident_and_timid_drafts_get_their_factors_back() -> None:
    generator = torch.Generator().manual_seed(5)
    true = torch.randn(40_000, 3, generator=generator, dtype=torch.float64) * 1.5 + 0.5
    wrong_by = torch.tensor([2.0, 0.5, 4.0], dtype=torch.float64)
    hits = torch.rand(true.shape, generator=generator, dtype=torch.float64) < torch.sigmoid(true)
    accepted = hits.long().cumprod(1).sum(1)
    raw = true * wrong_by
    factors = fit(raw, accepted)
    assert factors == pytest.approx(wrong_by.tolist(), rel=0.13)  # a step of the grid is 12 %
    before = survival_errors(raw, accepted, [1.0, 1.0, 1.0])
    after = survival_errors(raw, accepted, factors)
    assert max(after) < 0.02 < min(before[0], before[2])

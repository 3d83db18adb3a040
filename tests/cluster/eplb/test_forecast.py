"""What a plan is made for: shares of every step, drawn to their mean and, where little is known, to even load."""

import numpy as np
import pytest

from headrace.cluster.eplb.forecast import forecast
from headrace.transfer.errors import ConfigError


def test_a_steady_load_is_expected_to_stay_and_every_step_counts_alike() -> None:
    share = np.array([[40, 30, 20, 10]])
    rows = np.stack([share, 9 * share, 2 * share])
    expected = forecast(rows)
    assert expected.shape == rows.shape
    assert expected == pytest.approx(np.stack([4 * share] * 3))


def test_noise_is_drawn_to_the_mean_and_keeps_the_number_of_rows() -> None:
    rows = np.random.default_rng(0).poisson(5.0, (40, 2, 16))
    expected = forecast(rows)
    assert expected.sum() == pytest.approx(rows.sum())
    assert expected.std() < 0.8 * rows.std()
    assert expected.min() > 0.0


def test_steps_without_rows_expect_none_and_change_nothing() -> None:
    rows = np.random.default_rng(1).poisson(5.0, (20, 1, 8))
    with_pause = np.concatenate([rows, np.zeros((5, 1, 8), int)])
    assert (forecast(with_pause)[20:] == 0).all()
    assert (forecast(np.zeros((3, 1, 8), int)) == 0).all()


def test_rows_that_are_no_counts_are_refused() -> None:
    with pytest.raises(ConfigError):
        forecast(np.full((2, 1, 4), -1))

"""Survival products, thresholds, and what a pool of them promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.decode.survival import THRESHOLDS, SurvivalPool, distribute, survivals

chances = st.lists(st.floats(0.0, 1.0), max_size=6)


def test_survival_is_the_running_product() -> None:
    assert survivals([(0.5, 0.5, 1.0), (0.25,)]).tolist() == [[0.5, 0.25, 0.25], [0.25, 0.0, 0.0]]
    assert survivals([]).shape == (0, 0)
    assert survivals([(), ()]).shape == (2, 0)


def test_strange_confidences_are_bounded() -> None:
    found = survivals([(float("nan"), 1.0), (2.0, -1.0), (float("inf"), 0.5)])
    assert found.tolist() == [[0.0, 0.0], [1.0, 0.0], [1.0, 0.5]]


def test_drafts_at_or_above_the_threshold_are_verified() -> None:
    confidences = [(0.9, 0.5, 0.9), (0.2, 1.0), (), (1.0, 1.0, 1.0)]
    assert distribute(confidences, [3, 2, 0, 2], 0.45) == (2, 0, 0, 2)
    assert distribute(confidences, [3, 2, 5, 3], 0.0) == (3, 2, 0, 3)
    assert distribute(confidences, [3, 2, 0, 3], np.inf) == (0, 0, 0, 0)
    assert distribute([], [], 0.5) == ()


@given(st.lists(st.tuples(chances, st.integers(0, 6)), max_size=8), st.sampled_from(THRESHOLDS))
def test_winners_are_prefixes_and_losers_are_below(
    requests: list[tuple[list[float], int]], threshold: float
) -> None:
    confidences, available = [c for c, _ in requests], [a for _, a in requests]
    counts = distribute(confidences, available, threshold)
    for confidence, most, count in zip(confidences, available, counts, strict=True):
        products = np.multiply.accumulate([1.0, *confidence])[1:]
        limit = min(most, len(confidence))
        assert 0 <= count <= limit
        assert all(products[:count] >= threshold)
        assert count == limit or products[count] < threshold


def test_a_new_pool_believes_in_every_draft() -> None:
    pool = SurvivalPool(3)
    assert pool.drafts_per_request.tolist() == [0.0] + [3.0] * 64
    assert pool.tokens_per_request.tolist() == [1.0] + [4.0] * 64


def test_a_pool_counts_drafts_and_tokens_by_threshold() -> None:
    pool = SurvivalPool(2)
    pool.observe([(0.8, 0.5), (0.3,)])  # survivals 0.8, 0.4, 0.3 and none
    for threshold, drafts, tokens in ((0.75, 0.5, 0.4), (0.375, 1.0, 0.6), (0.25, 1.5, 0.75)):
        at = THRESHOLDS.tolist().index(threshold)
        assert pool.drafts_per_request[at] == pytest.approx(drafts)
        assert pool.tokens_per_request[at] == pytest.approx(1.0 + tokens)
    assert pool.drafts_per_request[0] == 0.0
    assert pool.tokens_per_request[0] == 1.0


def test_a_small_batch_remembers_steps_and_a_large_one_is_its_last_step() -> None:
    pool = SurvivalPool(1)
    half = THRESHOLDS.tolist().index(0.5)
    for confidence in (0.9, 0.1) * 32:
        pool.observe([(confidence,)])
    assert pool.drafts_per_request[half] == pytest.approx(0.5)
    pool.observe([(0.9,)] * 1000)
    assert pool.drafts_per_request[half] == pytest.approx(1.0)
    pool.observe([])
    assert pool.drafts_per_request[half] == pytest.approx(1.0)


def test_promises_are_held_against_what_was_accepted() -> None:
    pool = SurvivalPool(5)
    pool.observe([(0.9,) * 5] * 4)
    assert pool.honesty == 1.0
    for _ in range(200):
        pool.learn(10.0, 7)
    assert pool.honesty == pytest.approx(0.7, abs=0.01)
    full = 1.0 + sum(0.9**j for j in range(1, 6)) * pool.honesty
    assert pool.tokens_per_request[-1] == pytest.approx(full)
    before = pool.honesty
    for _ in range(10_000):
        pool.learn(0.0, 0)  # nothing was verified
    assert pool.honesty == before
    for _ in range(300):
        pool.learn(10.0, 0)
    assert pool.honesty == 0.5


def test_no_promise_exceeds_what_can_be_accepted() -> None:
    pool = SurvivalPool(2)
    pool.observe([(0.9, 0.9)])
    for _ in range(100):
        pool.learn(1.0, 2)
    assert (pool.tokens_per_request <= 1.0 + pool.drafts_per_request + 1e-12).all()

"""The sampler: its distribution, its ties, and its indifference to company."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.decode.sampler import sample, top_logprobs, uniform
from headrace.transfer.request import SamplingParams


def draws(logits: list[float], count: int, **kwargs: float) -> Counter[int]:
    """Tokens of ``count`` positions of one stream."""
    params = SamplingParams(**kwargs)  # type: ignore[arg-type]
    rows = torch.tensor(logits).expand(count, -1)
    return Counter(sample(rows, [params] * count, range(count)))


def chi_square(counts: Counter[int], expected: list[float]) -> float:
    total = sum(counts.values())
    return sum((counts[i] - total * p) ** 2 / (total * p) for i, p in enumerate(expected) if p > 0)


def softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    scaled = np.array(logits, dtype=np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return list(weights / weights.sum())


LOGITS = [1.0, 2.0, 0.5, 2.0, -1.0, 0.0, 1.5, -3.0]
CHI_SQUARE_7_DF_1E_6 = 40.5  # exceeded by chance once in a million


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_draws_follow_the_softmax(temperature: float) -> None:
    counts = draws(LOGITS, 6_000, temperature=temperature, seed=11)
    assert chi_square(counts, softmax(LOGITS, temperature)) < CHI_SQUARE_7_DF_1E_6


def test_top_k_keeps_the_smaller_ids_at_ties() -> None:
    counts = draws([1.0, 2.0, 1.0, 1.0], 4_000, temperature=1.0, top_k=2)
    assert set(counts) == {0, 1}
    expected = softmax([1.0, 2.0])
    assert chi_square(counts, expected) < 24.0


def test_top_p_keeps_the_shortest_prefix_that_reaches_it() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert set(draws(logits, 2_000, temperature=1.0, top_p=0.65)) == {1, 3}
    assert set(draws(logits, 2_000, temperature=1.0, top_p=0.75)) == {1, 2, 3}
    counts = draws(logits, 6_000, temperature=1.0, top_p=0.65)
    assert chi_square(counts, [0.0, 4 / 7, 0.0, 3 / 7]) < 24.0


def test_top_p_comes_before_top_k() -> None:
    # 0.55 needs two of {0.4, 0.3, 0.2, 0.1}, but only one of the renormalised pair {0.57, 0.43}.
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert set(draws(logits, 2_000, temperature=1.0, top_p=0.55, top_k=2)) == {1, 3}


def test_tiny_top_p_and_top_k_1_are_greedy() -> None:
    for kwargs in ({"top_p": 1e-9}, {"top_k": 1}):
        assert set(draws(LOGITS, 50, temperature=5.0, **kwargs)) == {1}


def test_greedy_takes_the_smallest_id_at_ties() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 5.0, 5.0], [1.0, 0.0, 2.0]])
    assert sample(logits, [SamplingParams()] * 3, [0, 1, 2]) == [1, 0, 2]


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(0, 8), [], []) == []


def test_a_wide_nucleus_reaches_past_the_first_candidates() -> None:
    vocabulary = 5_000
    counts = Counter(
        sample(
            torch.zeros(2_000, vocabulary),
            [SamplingParams(temperature=1.0, top_p=0.5)] * 2_000,
            range(2_000),
        )
    )
    assert max(counts) < vocabulary // 2 and max(counts) > vocabulary // 2 - 50


def test_uniform_is_pinned_and_spread() -> None:
    # The stream is part of the product: a change here changes every seeded answer.
    assert uniform(7, 3, "token") == uniform(7, 3, "token")
    assert len({uniform(7, 3, "token"), uniform(7, 4, "token"), uniform(8, 3, "token")}) == 3
    assert uniform(7, 3, "token") != uniform(7, 3, "accept")
    values = [uniform(seed, position, "token") for seed in range(40) for position in range(100)]
    buckets = Counter(int(value * 8) for value in values)
    assert chi_square(buckets, [1 / 8] * 8) < CHI_SQUARE_7_DF_1E_6
    assert abs(float(np.corrcoef(values[:-1], values[1:])[0, 1])) < 0.08


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    order=st.permutations(range(6)),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 5]),
)
def test_a_row_does_not_depend_on_its_company(
    seed: int, order: list[int], top_p: float, top_k: int
) -> None:
    logits = torch.randn(6, 777, generator=torch.Generator().manual_seed(seed % 2**31)) * 4
    params = [
        SamplingParams(temperature=0.3 * row, top_p=top_p, top_k=top_k, seed=seed)
        for row in range(6)
    ]
    positions = [100 + row for row in range(6)]
    alone = [sample(logits[r : r + 1], [params[r]], [positions[r]])[0] for r in range(6)]
    together = sample(logits[order], [params[r] for r in order], [positions[r] for r in order])
    assert together == [alone[r] for r in order]
    logprobs = top_logprobs(logits[order], 5)
    assert logprobs == [top_logprobs(logits[r : r + 1], 5)[0] for r in order]


def test_top_logprobs_are_the_raw_distribution_with_ties_by_id() -> None:
    (first, second) = top_logprobs(torch.tensor([LOGITS, [0.0] * 8]), 3)
    assert first.ids == (1, 3, 6)
    exact = np.log(softmax(LOGITS))
    assert first.logprobs == pytest.approx([exact[1], exact[3], exact[6]], abs=1e-12)
    assert second.ids == (0, 1, 2)
    assert second.logprobs == pytest.approx([-math.log(8)] * 3, abs=1e-12)
    assert len(top_logprobs(torch.tensor([LOGITS]), 20)[0].ids) == 8

"""Logprobs, ranks and the likeliest ids against their twin."""

import numpy as np
import pytest
import torch

from headrace.kernels import logprobs as kernel
from headrace.kernels.reference import logprobs as twin


@pytest.mark.parametrize("k", [0, 1, 5, 64, 1000])
@pytest.mark.parametrize("spread", [0.0, 3.0, 1e3])
def test_rows_equal_the_twins(k: int, spread: float, seeded: torch.Generator) -> None:
    logits = torch.randn(9, 64, generator=seeded) * spread
    logits[::2] = logits[::2].round()
    ids = torch.randint(64, (9,), generator=seeded).numpy()
    ours, theirs = kernel.token_logprobs(logits, ids, k), twin.token_logprobs(logits, ids, k)
    assert np.array_equal(ours.top_ids, theirs.top_ids) and ours.top_ids.shape == (9, min(k, 64))
    assert np.array_equal(ours.ranks, theirs.ranks)
    # 64 additions of positive numbers, a logarithm and a subtraction in float64
    for found, exact in (
        (ours.logprobs, theirs.logprobs),
        (ours.top_logprobs, theirs.top_logprobs),
    ):
        np.testing.assert_allclose(found, exact, rtol=1e-14, atol=1e-12)


def test_ranks_count_what_is_likelier() -> None:
    found = kernel.token_logprobs(torch.tensor([[1.0, 3.0, 2.0, 2.0]] * 4), np.arange(4), 3)
    assert found.ranks.tolist() == [4, 1, 2, 2]
    assert found.top_ids[0].tolist() == [1, 2, 3]


def test_impossible_ids_come_last() -> None:
    row = torch.tensor([[-float("inf"), 0.0, -float("inf"), 0.0]])
    found = kernel.token_logprobs(row, np.array([1]), 3)
    assert found.top_ids.tolist() == [[1, 3, 0]]
    assert found.logprobs.tolist() == pytest.approx([-np.log(2)])
    assert found.top_logprobs[0, 2] == -np.inf

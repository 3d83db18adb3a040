"""What a plan is made for: the rows to be expected, from the rows that were seen.

A plan fitted to a few noisy steps loses much of its balance on the steps that follow. Three things keep it:

    every step counts alike      a step's counts become shares, so that a large batch does not drown the others
    shrinkage                    each share moves a part of the way to the mean: less chance, same hot pairs
    hedging                      the less the mean is known, the nearer everything moves to even load, so that copies
                                 also go to experts that are not hot yet

How little the mean is known is measured: the variance of an expert's share from step to step over the variance of the
mean shares among experts, divided by the number of steps. A steady load is not hedged at all.
"""

import numpy as np
from numpy.typing import NDArray

from .measure import check_rows

__all__ = ["forecast"]

_SHRINK = 0.25
_HEDGE_PER_DOUBT, _MOST_HEDGE = 6.0, 0.3
"""All three chosen by cross-validation on the first 25 batches of DeepSeek-V2-Lite's counts."""


def forecast(rows: NDArray[np.generic]) -> NDArray[np.float64]:
    """Expected rows [steps, layers, experts], each step with the mean number of rows, after ``rows`` of that shape.

    Raises ConfigError for rows that are no counts.
    """
    counts = check_rows(rows)
    steps, _, experts = counts.shape
    total = counts.sum(2, keepdims=True)
    share = np.divide(counts, total, out=np.full_like(counts, 1 / experts), where=total > 0)
    weight = np.ones(steps)
    weight[total.sum((1, 2)) == 0] = 0.0
    known = weight.sum()
    mean = (
        np.einsum("t,tle->le", weight, share) / known
        if known
        else np.full_like(share[0], 1 / experts)
    )
    expected = (1 - _SHRINK) * share + _SHRINK * mean
    expected += _doubt(share, mean, float(known))[:, None] * (1 / experts - expected)
    return expected * total.mean(0, keepdims=True) * weight[:, None, None]


def _doubt(
    share: NDArray[np.float64], mean: NDArray[np.float64], known: float
) -> NDArray[np.float64]:
    """How far to move towards even load, [L]."""
    noise = share.var(0).mean(1)
    signal = mean.var(1)
    doubt = noise / np.maximum(signal * max(known, 1.0), 1e-30)
    return np.minimum(_MOST_HEDGE, _HEDGE_PER_DOUBT * doubt)

"""What a plan is made for: the rows to be expected, from the rows that were seen.

A plan fitted to a few noisy steps loses much of its balance on the steps that follow. Three things keep it:

    every step counts alike      a step's counts become shares, so that a large batch does not drown the others
    shrinkage                    each share moves a part of the way to the (decayed) mean: less chance, same hot pairs
    hedging                      the less the mean is known, the nearer everything moves to even load, so that copies
                                 also go to experts that are not hot yet

How little the mean is known is measured: the variance of an expert's share from step to step over the variance of the
mean shares among experts, divided by the number of steps. A steady load is not hedged at all.
"""

import numpy as np
from numpy.typing import NDArray

from ...transfer.errors import ConfigError
from .measure import check_rows

__all__ = ["forecast"]

_HEDGE_PER_DOUBT, _MOST_HEDGE = 6.0, 0.3
"""Chosen, as the default shrinkage is, by cross-validation on the first 25 batches of DeepSeek-V2-Lite's counts."""


def forecast(
    rows: NDArray[np.generic],
    *,
    shrink: float = 0.25,
    hedge: float | None = None,
    half_life: float | None = None,
    prior: NDArray[np.generic] | None = None,
    prior_steps: float = 0.0,
) -> NDArray[np.float64]:
    """Expected rows [steps, layers, experts], each step with the mean number of rows, after ``rows`` of that shape.

    Args:
        rows: what was counted, oldest step first.
        shrink: 0 keeps each step's shares, 1 replaces them by the mean.
        hedge: part of even load; by default from the doubt about the mean, at most 0.3.
        half_life: after so many steps a step weighs half; None weighs all alike.
        prior: rows [layers, experts] of earlier times, such as the stored statistics of a traffic class.
        prior_steps: how many steps of weight the prior has in the mean.

    Raises:
        ConfigError: a value outside its range, or a prior for other layers or experts.
    """
    counts = check_rows(rows)
    steps, layers, experts = counts.shape
    for name, value in (("shrink", shrink), ("hedge", 0.0 if hedge is None else hedge)):
        if not 0 <= value <= 1:
            raise ConfigError(f"{name} is {value}; it must be between 0 and 1")
    if (half_life is not None and half_life <= 0) or prior_steps < 0:
        raise ConfigError("half_life must be above 0 and prior_steps at least 0")
    total = counts.sum(2, keepdims=True)
    share = np.divide(counts, total, out=np.full_like(counts, 1 / experts), where=total > 0)
    age = np.arange(steps)[::-1]
    weight = np.ones(steps) if half_life is None else 0.5 ** (age / half_life)
    weight[total.sum((1, 2)) == 0] = 0.0
    mean = np.einsum("t,tle->le", weight, share)
    known = weight.sum()
    if prior is not None and prior_steps:
        if prior.shape != (layers, experts):
            raise ConfigError(
                f"the prior has shape {list(prior.shape)}; rows need {[layers, experts]}"
            )
        before = prior.astype(np.float64)
        mean += prior_steps * before / np.maximum(before.sum(1, keepdims=True), 1e-30)
        known += prior_steps
    mean = mean / known if known > 0 else np.full((layers, experts), 1 / experts)
    part = _doubt(share, mean, float(known)) if hedge is None else np.full(layers, hedge)
    expected = (1 - shrink) * share + shrink * mean
    expected += part[:, None] * (1 / experts - expected)
    size = total.mean(0, keepdims=True)
    return expected * size * (weight / max(weight.max(), 1e-30))[:, None, None]


def _doubt(
    share: NDArray[np.float64], mean: NDArray[np.float64], known: float
) -> NDArray[np.float64]:
    """How far to move towards even load, [L]."""
    noise = share.var(0).mean(1)
    signal = mean.var(1)
    doubt = noise / np.maximum(signal * max(known, 1.0), 1e-30)
    return np.minimum(_MOST_HEDGE, _HEDGE_PER_DOUBT * doubt)

"""What a placement makes of a series, as the figures that every command of ``headrace eplb`` prints."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .measure import rank_loads

RELEASED_EXPERT_BYTES = 18_800_640
"""An expert of the released model: three matrices of 5120 x 2304 in FP4 and a scale for 32 of them."""


def figures(rows: NDArray[np.generic], slots: NDArray[np.integer]) -> dict[str, Any]:
    """``rows`` [steps, layers, experts] under ``slots`` [layers, ranks, S].

    A balance is the mean rank's rows over those of the busiest rank of every step, 1.0 is perfect; ``rank_rows`` are
    sums over steps, [layers][ranks]. Raises ConfigError where the two do not fit.
    """
    loads = rank_loads(rows, slots)
    means, peaks = loads.mean(2).sum(0), loads.max(2).sum(0)
    total = float(peaks.sum())
    return {
        "balance": round(float(means.sum()) / total, 4) if total > 0 else None,
        "peak_over_mean": round(total / float(means.sum()), 4) if total > 0 else None,
        "balance_by_layer": [
            round(float(mean / peak), 4) if peak > 0 else None
            for mean, peak in zip(means, peaks, strict=True)
        ],
        "rank_rows": [[round(float(value), 1) for value in row] for row in loads.sum(0)],
    }

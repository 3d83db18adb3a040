"""A lower bound of every plan's cost, whatever it copies and wherever it puts it.

In a step the busiest rank carries at least the mean ``total / R``, and at least one whole copy of every expert, so at
least ``max over e of rows[e] / copies[e]``. Copies are at least 1, at most R (one a rank), add up to at most R x S, and
are the same in all steps. The least that any such choice of copies can make of
``sum over steps of max(total / R, max over e of rows[e] / copies[e])`` is bounded from below by Lagrange multipliers,
which hold whatever their values; ``kernels.copies.copies_bound`` has the argument and the search for good values.

The bound knows nothing of which experts share a rank. So it is tight where single experts make the peaks and where the
load is steady, and loose where peaks are chance sums of several experts.
"""

import numpy as np
from numpy.typing import NDArray

from ...kernels.copies import copies_bound

__all__ = ["layer_bound", "lower_bound"]

_ROUNDS = 60
_ROUNDING = 1e-5
"""The kernel works in float32: what it may be off by, relative."""


def layer_bound(rows: NDArray[np.float64], ranks: int, slots_per_rank: int) -> float:
    """Least sum over steps of the busiest rank's rows for ``rows`` [steps, experts]."""
    floor = rows.sum(1) / ranks
    least = float(floor.sum())
    if least <= 0:
        return 0.0
    unit = 2.0**24 / least
    x = np.ascontiguousarray(rows.T * unit).astype(np.float32)
    room = ranks * slots_per_rank
    most = min(ranks, room - rows.shape[1] + 1)
    found = copies_bound(x, (floor * unit).astype(np.float32), room, most, _ROUNDS)
    return max(least, float(found) / unit * (1 - _ROUNDING))


def lower_bound(rows: NDArray[np.float64], ranks: int, slots_per_rank: int) -> float:
    """The bound for ``rows`` [steps, layers, experts] in the unit of ``peak_over_mean``."""
    mean = float(rows.sum()) / ranks
    if mean <= 0:
        return 1.0
    layers = range(rows.shape[1])
    return sum(layer_bound(rows[:, layer], ranks, slots_per_rank) for layer in layers) / mean

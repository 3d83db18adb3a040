"""How many copies each expert of a layer gets (cluster/eplb), and what no choice of copies can go below.

Shapes: E experts, T steps; ``x`` is float32 [E, T], the load of an expert in a step.
"""

import numpy as np

from ._numba import Scalar, compiled

__all__ = ["copies_bound", "copies_by_peak"]


@compiled
def copies_by_peak(x: np.ndarray, spare: int, most: int, copies: np.ndarray) -> None:
    """Gives ``spare`` copies one by one, each where it lowers ``sum over steps of max over experts (x / copies)`` most.

    ``copies`` int64 [E] comes as ones; no expert gets more than ``most``. Without a gain the heaviest copy is split.
    """
    experts, steps = x.shape
    gain = np.empty(experts, np.float64)
    part = x.copy()
    sums = np.zeros(experts, np.float64)
    peak, second = np.empty(steps, np.float32), np.empty(steps, np.float32)
    at = np.empty(steps, np.int64)
    for e in range(experts):
        for t in range(steps):
            sums[e] += x[e, t]
    for _ in range(spare):
        peak[:] = np.float32(-1)
        second[:] = np.float32(-1)
        for e in range(experts):
            row = part[e]
            for t in range(steps):
                v, a = row[t], peak[t]
                second[t] = max(second[t], min(a, v))
                peak[t] = max(a, v)
        for e in range(experts):
            gain[e] = 1e-6 * sums[e] / copies[e]
        for t in range(steps):
            at[t] = -1
        for e in range(experts):
            row = part[e]
            hit = False
            for t in range(steps):
                hit |= row[t] == peak[t]
            if hit:
                for t in range(steps):
                    if row[t] == peak[t] and peak[t] > 0:
                        at[t] = e
        for t in range(steps):
            if at[t] >= 0:
                e = at[t]
                gain[e] += peak[t] - max(second[t], x[e, t] / np.float32(copies[e] + 1))
        best = -1
        for e in range(experts):
            if copies[e] < most and (best < 0 or gain[e] > gain[best]):
                best = e
        if best < 0:
            return
        copies[best] += 1
        for t in range(steps):
            part[best, t] = x[best, t] / np.float32(copies[best])


@compiled
def copies_bound(x: np.ndarray, floor: np.ndarray, room: int, most: int, rounds: int) -> Scalar:
    """A lower bound of ``sum over steps of max(floor, max over experts of x / copies)`` over all choices of copies.

    ``x`` float32 [E, T], ``floor`` float32 [T]; the copies add up to at most ``room`` and each is 1 to ``most``.
    For weights w[t, e] >= 0 that add up to at most 1 in every step, the maximum of a step is at least
    ``(1 - sum of w) floor + sum of w x / copies``. Summed over steps that is ``c + sum over e of A[e] / copies[e]``,
    and for any price u >= 0 no choice of copies makes it less than ``c + sum over e of min over real k in [1, most] of
    (A[e] / k + u k) - u room``. Every round puts the weight where the present copies peak and averages (fictitious
    play); the best of the rounds is returned, so it holds for any number of them.
    """
    experts, steps = x.shape
    load = np.zeros(experts, np.float64)
    k = np.ones(experts, np.float64)
    constant, best = 0.0, 0.0
    peak = np.empty(steps, np.float32)
    at = np.empty(steps, np.int64)
    for t in range(steps):
        best += floor[t]
    for n in range(rounds):
        for t in range(steps):
            peak[t] = floor[t]
            at[t] = -1
        for e in range(experts):
            part = np.float32(1.0 / k[e])
            row = x[e]
            hit = False
            for t in range(steps):
                hit |= row[t] * part > peak[t]
            if hit:
                for t in range(steps):
                    if row[t] * part > peak[t]:
                        peak[t] = row[t] * part
                        at[t] = e
        blend = 2.0 / (n + 2.0)
        load *= 1.0 - blend
        constant *= 1.0 - blend
        reached = 0.0
        for t in range(steps):
            if at[t] < 0:
                constant += blend * floor[t]
            else:
                load[at[t]] += blend * x[at[t], t]
            reached += peak[t]
        if reached <= best * 1.000001:  # these copies reach the bound
            return best
        low, high = 0.0, 1e-30
        for e in range(experts):
            high = max(high, load[e])
        for _ in range(40):
            u = 0.5 * (low + high)
            total = 0.0
            for e in range(experts):
                total += min(np.float64(most), max(1.0, np.sqrt(load[e] / u)))
            if total > room:
                low = u
            else:
                high = u
        value = constant - high * room
        for e in range(experts):
            k[e] = min(np.float64(most), max(1.0, np.sqrt(load[e] / high)))
            value += load[e] / k[e] + high * k[e]
        best = max(best, value)
    return best

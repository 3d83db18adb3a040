"""What a placement costs on given rows.

Shapes: ``rows`` [T steps, L layers, E experts]: how many rows each expert got; ``slots`` [L, R ranks, S]: the expert in
each slot, -1 for none. An expert's rows are split evenly over its copies, so rank r carries in step t
``sum over its slots of rows[t, l, e] / copies[l, e]``.
"""

import numpy as np
from numpy.typing import NDArray

from ...transfer.errors import ConfigError

__all__ = ["balance", "check_rows", "moved_slots", "peak_over_mean", "peaks", "rank_loads"]


def check_rows(rows: NDArray[np.generic], experts: int | None = None) -> NDArray[np.float64]:
    """``rows`` as float64 after checking them.

    Raises:
        ConfigError: not [steps, layers, experts], empty, negative or not finite.
    """
    if rows.ndim != 3 or 0 in rows.shape:
        raise ConfigError(
            f"rows have shape {list(rows.shape)}; give [steps, layers, experts], none of them 0"
        )
    if rows.dtype.kind not in "iuf":
        raise ConfigError(f"rows have type {rows.dtype}; give integers or floating-point numbers")
    if experts is not None and rows.shape[2] != experts:
        raise ConfigError(f"rows have {rows.shape[2]} experts, the placement has {experts}")
    values = rows.astype(np.float64)
    if not np.isfinite(values).all() or values.min() < 0:
        raise ConfigError("rows hold a negative or non-finite number; counts are at least 0")
    return values


def rank_loads(rows: NDArray[np.generic], slots: NDArray[np.integer]) -> NDArray[np.float64]:
    """Rows per rank, [T, L, R].

    Raises:
        ConfigError: the layers differ, or rows go to an expert without a slot.
    """
    steps, layers, experts = rows.shape
    if slots.ndim != 3 or slots.shape[0] != layers:
        raise ConfigError(
            f"slots have shape {list(slots.shape)}; rows of {layers} layers need [{layers}, ranks, slots]"
        )
    loads = np.empty((steps, layers, slots.shape[1]))
    for layer in range(layers):
        rank, slot = np.nonzero(slots[layer] >= 0)
        held = slots[layer][rank, slot]
        copies = np.bincount(held, minlength=experts)
        lost = np.flatnonzero((copies == 0) & (rows[:, layer].sum(0) > 0))
        if lost.size or copies.size > experts:
            raise ConfigError(
                f"layer {layer}: expert {lost[0] if lost.size else copies.size - 1} has rows or a slot but not both; "
                f"place every one of the {experts} experts"
            )
        part = np.zeros((experts + 1, steps))  # the last row is what an empty slot carries
        part[:experts] = (rows[:, layer] / np.maximum(copies, 1)).T
        loads[:, layer] = part[slots[layer]].sum(1).T
    return loads


def peaks(rows: NDArray[np.generic], slots: NDArray[np.integer]) -> NDArray[np.float64]:
    """Rows of the busiest rank, [T, L]."""
    return rank_loads(rows, slots).max(2)


def peak_over_mean(rows: NDArray[np.generic], slots: NDArray[np.integer]) -> float:
    """Sum over steps and layers of the busiest rank's rows, over the sum of the mean rank's rows: 1.0 is perfect."""
    loads = rank_loads(rows, slots)
    mean = loads.mean(2).sum()
    return float(loads.max(2).sum() / mean) if mean > 0 else 1.0


def balance(rows: NDArray[np.generic], slots: NDArray[np.integer]) -> NDArray[np.float64]:
    """Mean over busiest rank of each layer's rows summed over the steps, [L]: 1.0 is perfect."""
    loads = rank_loads(rows.sum(0, keepdims=True), slots)[0]
    busiest = loads.max(1)
    return np.divide(loads.mean(1), busiest, out=np.ones_like(busiest), where=busiest > 0)


def moved_slots(slots: NDArray[np.integer], present: NDArray[np.integer]) -> int:
    """How many slots have to be filled to come from ``present`` to ``slots``: experts a rank holds and did not hold."""
    layers, ranks, _ = slots.shape
    experts = int(max(slots.max(), present.max())) + 1
    shape = (layers, ranks, experts + 1)  # the last column takes the empty slots
    held, had = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    at = np.ix_(range(layers), range(ranks))
    for grid, placed in ((held, slots), (had, present)):
        for s in range(placed.shape[2]):
            grid[at[0], at[1], placed[:, :, s]] = True
    return int((held & ~had)[:, :, :experts].sum())

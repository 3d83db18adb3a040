"""Seconds of a piece of a step, by rows and context per row: profiled once, corrected while running by medians.

    seconds = table(rows, context)      bilinear between grid points, linear beyond them
    factor  = median(measured / table)  of the last samples nearest to a grid point, once there are enough

A point without samples of its own takes the factor of the nearest point that has them, so what the profile says about
the *ratio* of two sizes stays. The corrected table is forced monotone in both directions: more work never costs less.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MIN_SAMPLES = 10
MAX_SAMPLES = 50
_REFRESH_EVERY = 8


class CostTable:
    """Expected seconds on a grid of ``rows`` x ``contexts``, both ascending; ``seconds`` [rows, contexts], positive.

    One context stands for a cost that does not depend on it. Raises ValueError for another shape or order, or for
    a time that is not a positive number.
    """

    def __init__(
        self, rows: Sequence[float], contexts: Sequence[float], seconds: npt.ArrayLike
    ) -> None:
        table = np.array(seconds, dtype=np.float64)
        if table.shape != (len(rows), len(contexts)) or not table.size:
            raise ValueError(f"seconds have shape {table.shape}, not {(len(rows), len(contexts))}")
        if not (np.isfinite(table).all() and (table > 0.0).all()):
            raise ValueError(f"seconds = {table.tolist()} are not allowed: positive numbers")
        self._rows = _axis("rows", rows)
        self._contexts = _axis("contexts", contexts)
        self._base = _monotone(table)
        self._table = self._base
        self._ratios: list[deque[float]] = [deque(maxlen=MAX_SAMPLES) for _ in range(table.size)]
        self._distances = _distances(self._rows, self._contexts)
        # plain numbers: for one value numpy is ten times as slow
        self._log_rows: list[float] = np.log1p(self._rows).tolist()
        self._log_contexts: list[float] = np.log1p(self._contexts).tolist()
        self._row_points: list[float] = self._rows.tolist()
        self._context_points: list[float] = self._contexts.tolist()
        self._base_numbers: list[list[float]] = self._base.tolist()
        self._since_refresh = 0

    @property
    def rows(self) -> tuple[float, ...]:
        """Grid points along rows."""
        return tuple(self._rows.tolist())

    @property
    def contexts(self) -> tuple[float, ...]:
        """Grid points along the context per row."""
        return tuple(self._contexts.tolist())

    @property
    def profiled(self) -> list[list[float]]:
        """Seconds [rows, contexts] before any correction."""
        return self._base.tolist()

    def seconds(self, rows: npt.ArrayLike, context: float = 0.0) -> Floats:
        """Corrected seconds for every number of ``rows``, each with ``context`` tokens before it; 0 for no rows."""
        return self._interpolate(self._table, np.asarray(rows, dtype=np.float64), context)

    def observe(self, rows: float, context: float, seconds: float) -> None:
        """Learn from one measurement. One without rows or without time teaches nothing."""
        if rows <= 0 or not (math.isfinite(seconds) and seconds > 0.0):
            return
        predicted = self._predicted(rows, context)
        row = _nearest(self._log_rows, math.log1p(rows))
        column = _nearest(self._log_contexts, math.log1p(max(context, 0.0)))
        self._ratios[row * len(self._contexts) + column].append(seconds / predicted)
        self._since_refresh += 1
        if self._since_refresh >= _REFRESH_EVERY:
            self._since_refresh = 0
            self._table = self._corrected()

    def _predicted(self, rows: float, context: float) -> float:
        """Profiled seconds of one size; what ``_interpolate`` gives for many."""
        low, share = _place(self._row_points, rows)
        column, weight = _place(self._context_points, context)
        ends = [
            line[column] + (weight * (line[column + 1] - line[column]) if weight else 0.0)
            for line in self._base_numbers[low : low + 2]
        ]
        return ends[0] + (share * (ends[1] - ends[0]) if share else 0.0)

    def _corrected(self) -> Floats:
        known = [i for i, ratios in enumerate(self._ratios) if len(ratios) >= MIN_SAMPLES]
        if not known:
            return self._base
        medians = np.array([median(self._ratios[i]) for i in known])
        factors = medians[self._distances[:, known].argmin(axis=1)]
        return _monotone(self._base * factors.reshape(self._base.shape))

    def _interpolate(self, table: Floats, rows: Floats | np.float64, context: float) -> Floats:
        column = _between(table.T, self._contexts, np.float64(context))
        return np.where(rows > 0, _between(column, self._rows, rows), 0.0)


def _axis(name: str, points: Sequence[float]) -> Floats:
    axis = np.array(points, dtype=np.float64)
    if not np.isfinite(axis).all() or (axis < 0.0).any() or (np.diff(axis) <= 0.0).any():
        raise ValueError(f"{name} = {list(points)} are not allowed: ascending, from 0 up")
    return axis


def _between(table: Floats, axis: Floats, places: Floats | np.float64) -> Floats:
    """Entries of ``table`` [axis, ...] at ``places``: linear between and above the points, constant below the first."""
    if len(axis) == 1:
        return table[np.zeros_like(places, dtype=np.intp)]
    places = np.maximum(places, axis[0])
    low = np.clip(np.searchsorted(axis, places) - 1, 0, len(axis) - 2)
    share = (places - axis[low]) / (axis[low + 1] - axis[low])
    return table[low] + share * (table[low + 1] - table[low])


def _place(axis: Sequence[float], at: float) -> tuple[int, float]:
    """(index of the point below, share of the way to the next one): as ``_between`` finds it."""
    if len(axis) == 1 or at <= axis[0]:
        return 0, 0.0
    low = min(bisect_left(axis, at) - 1, len(axis) - 2)
    return low, (at - axis[low]) / (axis[low + 1] - axis[low])


def _nearest(axis: Sequence[float], at: float) -> int:
    """Index of the nearest point of ``axis``, the lower one of two."""
    above = bisect_left(axis, at)
    if above == 0:
        return 0
    if above == len(axis):
        return above - 1
    return above - 1 if at - axis[above - 1] <= axis[above] - at else above


def _monotone(table: Floats) -> Floats:
    return np.maximum.accumulate(np.maximum.accumulate(table, axis=0), axis=1)


def _distances(rows: Floats, contexts: Floats) -> Floats:
    """[points, points]: how far apart two grid points are, in factors."""
    row, context = (
        axis.ravel() for axis in np.meshgrid(np.log1p(rows), np.log1p(contexts), indexing="ij")
    )
    return np.hypot(row[:, None] - row, context[:, None] - context)

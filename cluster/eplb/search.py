"""One layer's plan: a greedy start, then local search on the sum of per-step peaks (kernels/balance.py).

    copies by peak                      -> placed by peak alone       -+
    copies by peak                      -> placed for even ranks too  -+-> a short search of each, the best goes on
    copies for four fifths of the mean  -> placed for even ranks too  -+   -> longer searches with ever smaller losses

Two copies that fill a rank's share each cannot lie together, and many that are just above half of it leave others no
room; so the third start gives heavy experts only as many copies as bring a copy below four fifths of the mean rank.

The number of tries is fixed beforehand, so a plan is the same on every machine that is fast enough; the deadline only
stops searches early.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...kernels import balance as kernel
from ...kernels.copies import copies_by_peak
from .baselines import contiguous

__all__ = ["LayerSearch", "Task"]

_TOTAL = 2.0**30
"""All load of a layer in the kernels' unit."""
_LANES = 16
_CHUNK = 1000
"""Tries between two looks at the clock."""
_EVEN = 16
"""``kernels.balance.place``: how little a rank's own load counts beside the peaks."""
_ENOUGH = 0.8
_CROSSING = 0.1
"""What a row that leaves its domain costs, in rows of work."""
_FREE = ((1200, 0.0001), (3000, 0.003), (3500, 0.0005), (6500, 0.0001))
_PRICED = ((2500, 0.0003), (4000, 0.0002), (7000, 0.0001))
"""Tries, and the loss that the first of them accept, as a part of the mean rank's rows of all steps. Where moves have a
price, large losses would be moves without a purpose."""
_COPY_EVERY_FREE, _COPY_EVERY_PRICED = 4, 2
"""One try in so many changes who has copies; the others swap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is alike for all layers. ``effort`` 1.0 is the number of tries above; ``until`` is of time.perf_counter."""

    ranks: int
    slots_per_rank: int
    ranks_per_domain: int
    move_cost: float
    effort: float
    until: float

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return time.perf_counter() >= self.until


class _State:
    """A placement with everything that the kernels keep beside it."""

    def __init__(self, search: "LayerSearch", slots: NDArray[np.int32]) -> None:
        task, (experts, width) = search.task, search.x.shape
        self.slots = slots
        self.copies = np.zeros(experts, np.int64)
        self.share = np.zeros((experts, width), np.int32)
        self.held = np.zeros((task.ranks, experts), np.bool_)
        self.load = np.zeros((task.ranks, width), np.int32)
        self.top = np.zeros((3, width), np.int32)
        self.seed = np.array([0x9E3779B97F4A7C15 ^ (search.layer + 1)], np.uint64)
        kernel.refresh(search.x, slots, self.copies, self.share, self.held, self.load, self.top)
        self.in_domain = np.zeros((int(search.domain[-1]) + 1, experts), np.int64)
        np.add.at(self.in_domain, search.domain, self.held.astype(np.int64))

    def cost(self, search: "LayerSearch") -> int:
        filled = int((self.held & ~search.had).sum()) * search.fill_cost
        away = int(((self.in_domain == 0).sum(0) * search.away).sum())
        return int(self.top[0].sum(dtype=np.int64)) + filled + away


class LayerSearch:
    """Searches one layer: ``start`` once, then ``go_on`` as long as time is left; ``best`` is always a valid placement.

    Args:
        rows: float64 [steps, experts].
        present: int32 [ranks, slots_per_rank] or None.
    """

    def __init__(
        self, rows: NDArray[np.float64], task: Task, present: NDArray[np.int32] | None, layer: int
    ) -> None:
        self.task = task
        self.layer = layer
        rows = _merged(rows)
        self._steps, experts = rows.shape
        total = float(rows.sum())
        self._unit = _TOTAL / total if total > 0 else 0.0
        self.x = np.zeros((experts, -(-self._steps // _LANES) * _LANES), np.float32)
        self.x[:, : self._steps] = rows.T * self._unit
        self.domain = np.arange(task.ranks) // task.ranks_per_domain
        domains = int(self.domain[-1]) + 1
        crossing = rows.sum(0) * self._unit * _CROSSING / (domains * task.ranks)
        self.away = np.rint(crossing).astype(np.int64) * (domains > 1)
        self.had = np.zeros((task.ranks, experts), np.bool_)
        self._present = present
        if present is not None:
            rank, slot = np.nonzero(present >= 0)
            self.had[rank, present[rank, slot]] = True
        priced = present is not None
        self.fill_cost = int(min(task.move_cost * self._unit, _TOTAL)) if priced else 0
        self.best = self._least()
        self._best_cost = _State(self, self.best).cost(self)
        self._states: list[_State] = []
        self._left: list[tuple[int, float]] = []

    def _least(self) -> NDArray[np.int32]:
        """A valid placement that costs no search: what is there, or the experts in their order."""
        if self._present is not None:
            return self._present.copy()
        return contiguous(1, self.x.shape[0], self.task.ranks, self.task.slots_per_rank)[0]

    def start(self) -> None:
        """The greedy starts; nothing if the deadline has passed or no row was counted."""
        if self.task.late or not self._unit:
            return
        copies = np.ones(self.x.shape[0], np.int64)
        spare = self.task.ranks * self.task.slots_per_rank - copies.size
        copies_by_peak(self.x, spare, self.task.ranks, copies)
        if self._present is not None:
            self._states.append(_State(self, self._present.copy()))
            self._states.append(_State(self, self._recopied(self._present, copies)))
        if self._present is None or not self.fill_cost:
            empty = np.full((self.task.ranks, self.task.slots_per_rank), -1, np.int32)
            self._states += [_State(self, self._filled(empty, copies, even)) for even in (0, _EVEN)]
            if (enough := self._enough()) is not None:
                self._states.append(_State(self, self._filled(empty, enough, _EVEN)))
        for state in self._states:
            self._keep(state)
        self._left = list(_PRICED if self.fill_cost else _FREE)

    def go_on(self) -> bool:
        """The next search, the first one from every start; False when there is none or the deadline has passed."""
        if not self._left or self.task.late:
            return False
        search = self._left.pop(0)
        for state in self._states:
            self._run(state, *search)
        self._states = [min(self._states, key=lambda state: state.cost(self))]
        return bool(self._left)

    def _filled(
        self, kept: NDArray[np.int32], copies: NDArray[np.int64], even: int
    ) -> NDArray[np.int32]:
        """``kept`` with the copies that it lacks, heaviest first."""
        slots = np.take_along_axis(kept, (kept < 0).argsort(axis=1, kind="stable"), axis=1)
        held = np.zeros((self.task.ranks, copies.size), np.bool_)
        rank, slot = np.nonzero(slots >= 0)
        held[rank, slots[rank, slot]] = True
        share = np.rint(self.x / copies[:, None].astype(np.float32)).astype(np.int32)
        owner = np.repeat(np.arange(copies.size), np.maximum(copies - held.sum(0), 0))
        order = owner[(-share.sum(1, dtype=np.int64)[owner]).argsort(kind="stable")]
        kernel.place(share, order, even, slots, held)
        return slots

    def _enough(self) -> NDArray[np.int64] | None:
        """Copies that bring every copy below a part of the mean rank, spare ones to the heaviest; None if too many."""
        total = self.x.sum(1, dtype=np.float64)
        room = self.task.ranks * self.task.slots_per_rank
        aim = _ENOUGH * float(total.sum()) / self.task.ranks
        copies = np.clip(np.ceil(total / aim), 1, self.task.ranks).astype(np.int64)
        spare = room - int(copies.sum())
        if spare < 0:
            return None
        single = np.flatnonzero(copies == 1)
        copies[single[(-total[single]).argsort(kind="stable")[:spare]]] += self.task.ranks > 1
        return copies

    def _recopied(self, present: NDArray[np.int32], copies: NDArray[np.int64]) -> NDArray[np.int32]:
        """``present`` with only the copies changed: too many are taken from the busiest ranks, too few are added."""
        slots = present.copy()
        has = np.bincount(slots[slots >= 0], minlength=copies.size)
        part = self.x.sum(1) / copies
        load = np.where(slots >= 0, part[slots], 0).sum(1)
        for e in np.flatnonzero(has > copies):
            rank, slot = np.nonzero(slots == e)
            for i in (-load[rank]).argsort(kind="stable")[: has[e] - copies[e]]:
                slots[rank[i], slot[i]] = -1
                load[rank[i]] -= part[e]
        return self._filled(slots, copies, _EVEN)

    def _run(self, state: _State, trials: int, slack: float) -> None:
        total = max(1, round(trials * self.task.effort))
        mean = _TOTAL / self.task.ranks
        for begun in range(0, total, _CHUNK):
            if self.task.late:
                break
            count = min(_CHUNK, total - begun)
            begin, end = (slack * mean * (1 - done / total) for done in (begun, begun + count))
            kernel.improve(
                self.x,
                state.slots,
                state.copies,
                state.share,
                state.held,
                self.had,
                self.fill_cost,
                self.domain,
                state.in_domain,
                self.away,
                state.load,
                state.top,
                self._steps,
                count,
                int(begin),
                int(end),
                _COPY_EVERY_PRICED if self.fill_cost else _COPY_EVERY_FREE,
                state.seed,
            )
        self._keep(state)

    def _keep(self, state: _State) -> None:
        cost = state.cost(self)
        if cost < self._best_cost:
            self._best_cost = cost
            self.best = state.slots.copy()


def _merged(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """``rows`` as one step if all are multiples of one: the sum of their peaks is then the peak of their sum."""
    total = rows.sum(0, keepdims=True)
    size = rows.sum(1, keepdims=True) / max(float(total.sum()), 1e-30)
    return total if np.allclose(rows, size * total, rtol=1e-9, atol=0.0) else rows

"""A deployment's rebalancing over a saved series, in the order of time and without a cluster.

    steps     0 ........ interval ........ 2 x interval ..........
    seen      |<--- rows ---->|  consider, decide
    in force  present         |  ~~ moving ~~ | new plan, at once for all layers

A move takes the mean rank's bytes over the bandwidth cap of a rank, and no decision is taken meanwhile. Nothing that
comes after a step is known in it.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import EplbConfig
from .measure import rank_loads
from .policy import Rebalancer

Slots = NDArray[np.integer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """``interval`` passes between decisions; one pass takes ``step_s`` seconds."""

    interval: int
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Passes ``first`` to before ``end``, and what was decided before them.

    Balances are rows of the mean rank over those of the busiest of every pass; None without rows.
    """

    first: int
    end: int
    epoch: int
    outcome: str
    reason: str
    balance: float | None
    balance_unmoved: float | None
    predicted_balance: float | None
    moved_experts: int
    moved_bytes: int
    plan_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replayed:
    """All intervals, the balance over all of them with and without moves, and the placement at the end."""

    intervals: tuple[Interval, ...]
    balance: float | None
    balance_unmoved: float | None
    slots: NDArray[np.int32]


def replay(
    rows: NDArray[np.generic],
    present: NDArray[np.int32],
    config: EplbConfig,
    pace: Pace,
    expert_bytes: int,
) -> Replayed:
    """``rows`` [steps, layers, experts], beginning with ``present`` [layers, ranks, S].

    Raises ConfigError where the two do not fit.
    """
    brain = Rebalancer(
        config, ranks=present.shape[1], slots_per_rank=present.shape[2], expert_bytes=expert_bytes
    )
    unmoved = _Loads.of(rows, present)
    carried = _Loads.of(rows, present)
    slots, epoch, in_force = present, 0, 0
    intervals: list[Interval] = []
    for first in range(0, len(rows), pace.interval):
        end = min(first + pace.interval, len(rows))
        now = Interval(
            first=first,
            end=end,
            epoch=epoch,
            outcome="kept",
            reason="nothing seen yet" if first == 0 else "the last move is under way",
            balance=None,
            balance_unmoved=unmoved.balance(first, end),
            predicted_balance=None,
            moved_experts=0,
            moved_bytes=0,
            plan_s=0.0,
        )
        if first and first >= in_force:
            seen = rows[max(0, first - config.keep_steps) : first]
            proposal = brain.consider(seen, slots)
            now = replace(
                now,
                reason=proposal.reason,
                predicted_balance=proposal.predicted_balance,
                plan_s=proposal.plan_s,
            )
            if proposal.pays:
                slots, epoch = np.asarray(proposal.slots, np.int32), epoch + 1
                in_force = first + _steps_of_move(
                    proposal.moved_bytes / len(slots[0]), config, pace
                )
                carried.change(rows, slots, in_force)
                now = replace(
                    now,
                    epoch=epoch,
                    outcome="moved",
                    moved_experts=proposal.moved,
                    moved_bytes=proposal.moved_bytes,
                )
        intervals.append(replace(now, balance=carried.balance(first, end)))
    return Replayed(
        intervals=tuple(intervals),
        balance=carried.balance(0, len(rows)),
        balance_unmoved=unmoved.balance(0, len(rows)),
        slots=np.asarray(slots, np.int32),
    )


def _steps_of_move(bytes_a_rank: float, config: EplbConfig, pace: Pace) -> int:
    """Passes until a move is in force, at least one."""
    seconds = bytes_a_rank / (config.bandwidth_mib_per_s * 2**20)
    return max(1, int(np.ceil(seconds / pace.step_s)))


class _Loads:
    """Mean and peak of every step, summed over layers, under the placements that were in force."""

    def __init__(self, means: NDArray[np.float64], peaks: NDArray[np.float64]) -> None:
        self._means, self._peaks = means, peaks

    @classmethod
    def of(cls, rows: NDArray[np.generic], slots: Slots) -> "_Loads":
        loads = rank_loads(rows, slots)
        return cls(loads.mean(2).sum(1), loads.max(2).sum(1))

    def change(self, rows: NDArray[np.generic], slots: Slots, first: int) -> None:
        """``slots`` are in force from step ``first`` on."""
        if first < len(rows):
            self._peaks[first:] = rank_loads(rows[first:], slots).max(2).sum(1)

    def balance(self, first: int, end: int) -> float | None:
        peak = float(self._peaks[first:end].sum())
        return float(self._means[first:end].sum()) / peak if peak > 0 else None


def document(replayed: Replayed) -> dict[str, Any]:
    """Plain values of it, units in the names; without the placement."""
    return {
        "balance": _rounded(replayed.balance),
        "balance_unmoved": _rounded(replayed.balance_unmoved),
        "moves": sum(interval.outcome == "moved" for interval in replayed.intervals),
        "moved_experts": sum(interval.moved_experts for interval in replayed.intervals),
        "moved_bytes": sum(interval.moved_bytes for interval in replayed.intervals),
        "plan_s": round(sum(interval.plan_s for interval in replayed.intervals), 3),
        "intervals": [
            {
                "first_step": interval.first,
                "end_step": interval.end,
                "epoch": interval.epoch,
                "outcome": interval.outcome,
                "reason": interval.reason,
                "balance": _rounded(interval.balance),
                "balance_unmoved": _rounded(interval.balance_unmoved),
                "predicted_balance": _rounded(interval.predicted_balance),
                "moved_experts": interval.moved_experts,
                "moved_bytes": interval.moved_bytes,
                "plan_s": round(interval.plan_s, 3),
            }
            for interval in replayed.intervals
        ],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)

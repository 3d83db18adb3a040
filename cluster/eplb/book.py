"""The book of one instance: what its ranks routed, under which placement, what was decided and what came of it. Pure.

collection --> add(steps, rows, slots, epoch)          one line a pass: rows, mean, peak, epoch
decision   --> decided(proposal)                       one line a decision
ranks say  --> in_force(epoch) | dropped(epoch, why)   the decision's outcome
report()   --> one instance of ``Cluster.eplb_report()``
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .figures import figures
from .measure import rank_loads
from .policy import Proposal

_KEEP_PASSES = 20_000
_KEEP_DECISIONS = 1_000
_TOTALS = ("moved_bytes", "moved_experts", "flips", "abandoned", "stall_s")


@dataclass(frozen=True, slots=True)
class _Pass:
    """``mean`` and ``peak`` are rows of the mean and of the busiest rank, summed over layers."""

    step: int
    rows: float
    mean: float
    peak: float
    epoch: int


class InstanceBook:
    """Not for several threads at a time. ``window`` is the number of passes that the heat map covers."""

    def __init__(self, instance: int, *, num_experts: int, expert_bytes: int, window: int) -> None:
        self._instance = instance
        self._num_experts, self._expert_bytes, self._window = num_experts, expert_bytes, window
        self._passes: deque[_Pass] = deque(maxlen=_KEEP_PASSES)
        self._recent: deque[tuple[int, NDArray[np.int32]]] = deque(maxlen=window)
        self._history: deque[dict[str, Any]] = deque(maxlen=_KEEP_DECISIONS)

    @property
    def next_step(self) -> int:
        """The first pass that is not in the book."""
        return self._passes[-1].step + 1 if self._passes else 0

    def recent(self) -> NDArray[np.int32]:
        """Rows [passes, layers, experts] of the last ``window`` passes that had any; raises nothing, may be empty."""
        rows = [rows for _, rows in self._recent if rows.any()]
        return np.stack(rows) if rows else np.zeros((0, 1, self._num_experts), np.int32)

    def add(
        self,
        steps: NDArray[np.int64],
        rows: NDArray[np.int32],
        slots: NDArray[np.integer],
        epoch: int,
    ) -> None:
        """Passes ``steps`` [n] with ``rows`` [n, layers, experts], summed over ranks, under ``slots`` of ``epoch``.

        Passes that are in the book already are left out.
        """
        new = steps >= self.next_step
        if not new.any():
            return
        steps, rows = steps[new], rows[new]
        loads = rank_loads(rows, slots)
        layers = rows.shape[1]
        total = rows.sum((1, 2)) / layers
        means, peaks = loads.mean(2).sum(1), loads.max(2).sum(1)
        for place, step in enumerate(steps.tolist()):
            self._recent.append((step, rows[place]))
            line = _Pass(step, float(total[place]), float(means[place]), float(peaks[place]), epoch)
            self._passes.append(line)

    def decided(self, proposal: Proposal, *, epoch: int, time_s: float) -> None:
        """A decision after the last pass of the book; one that pays is offered as ``epoch``, another keeps it."""
        self._history.append(
            {
                "epoch": epoch,
                "outcome": "moving" if proposal.pays else "kept",
                "reason": proposal.reason,
                "time_s": round(time_s, 3),
                "step": self.next_step,
                "in_force_step": None,
                "balance_before": _rounded(proposal.before_balance),
                "predicted_balance": _rounded(proposal.predicted_balance),
                "achieved_balance": None,
                "moved_bytes": proposal.moved_bytes if proposal.pays else 0,
                "moved_experts": proposal.moved if proposal.pays else 0,
                "plan_s": round(proposal.plan_s, 4),
                "move_s": 0.0,
                "stall_s": 0.0,
            }
        )

    def in_force(self, epoch: int, *, step: int, time_s: float, stall_s: float = 0.0) -> None:
        """The plan offered as ``epoch`` has been in force in all layers of all ranks since pass ``step``."""
        more = {"in_force_step": step, "stall_s": round(stall_s, 6)}
        self._settle(epoch, ("moving", "refused"), "moved", time_s, more)

    def dropped(
        self, epoch: int, reason: str, *, time_s: float, outcome: str = "abandoned"
    ) -> None:
        """The plan offered as ``epoch`` was given up, or refused, by the ranks."""
        self._settle(epoch, ("moving",), outcome, time_s, {"reason": reason})

    def report(
        self, slots: NDArray[np.integer], epoch: int, totals: Mapping[str, float]
    ) -> dict[str, Any]:
        """One instance of the report, with ``slots`` [layers, ranks, S] in force; ``totals`` are those of its ranks."""
        rows = self.recent()
        seen = figures(rows, slots) if len(rows) else dict.fromkeys(_EMPTY)
        self._judge()
        now = next(
            (e for e in reversed(self._history) if e["epoch"] == epoch and e["outcome"] == "moved"),
            None,
        )
        return {
            "instance": self._instance,
            "num_experts": self._num_experts,
            "expert_bytes": self._expert_bytes,
            "epoch": epoch,
            "placement": slots.tolist(),
            "last_step": self.next_step - 1,
            "window_steps": len(rows),
            "rank_rows": seen["rank_rows"] or [],
            "balance_by_layer": seen["balance_by_layer"] or [],
            "balance": seen["balance"],
            "predicted_balance": None if now is None else now["predicted_balance"],
            "achieved_balance": None if now is None else now["achieved_balance"],
            **{name: totals.get(name, 0) for name in _TOTALS},
            "history": [dict(entry) for entry in self._history],
            "series": {
                "steps": [line.step for line in self._passes],
                "rows": [round(line.rows, 2) for line in self._passes],
                "balance": [
                    _rounded(line.mean / line.peak) if line.peak > 0 else None
                    for line in self._passes
                ],
                "epoch": [line.epoch for line in self._passes],
            },
        }

    def _judge(self) -> None:
        """Note what every plan in force achieved; one whose passes have left the book keeps its last figure."""
        moved = {entry["epoch"]: entry for entry in self._history if entry["outcome"] == "moved"}
        sums: dict[int, tuple[float, float]] = {}
        for line in self._passes:
            entry = moved.get(line.epoch)
            if entry is not None and line.step >= entry["in_force_step"]:
                mean, peak = sums.get(line.epoch, (0.0, 0.0))
                sums[line.epoch] = mean + line.mean, peak + line.peak
        for epoch, (mean, peak) in sums.items():
            if peak > 0:
                moved[epoch]["achieved_balance"] = _rounded(mean / peak)

    def _settle(
        self,
        epoch: int,
        outcomes: Collection[str],
        outcome: str,
        time_s: float,
        more: Mapping[str, object],
    ) -> None:
        """The newest decision of ``epoch`` whose outcome is one of ``outcomes`` gets ``outcome``."""
        for entry in reversed(self._history):
            if entry["epoch"] == epoch and entry["outcome"] in outcomes:
                entry |= {
                    "outcome": outcome,
                    "move_s": round(time_s - entry["time_s"], 3),
                    **more,
                }
                return


_EMPTY = ("rank_rows", "balance_by_layer", "balance")


def _rounded(value: float) -> float:
    return round(value, 4)

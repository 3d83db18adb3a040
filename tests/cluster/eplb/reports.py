"""A report of expert placement as a cluster gives it, for tests of what shows it."""

from typing import Any

import numpy as np

from headrace.cluster.eplb.figures import figures
from headrace.cluster.eplb.watch import Piece
from headrace.model.placement import ExpertPlacement

LAYERS, RANKS, SLOTS, EXPERTS = 3, 4, 5, 16


def rows_of(steps: int, seed: int = 0) -> np.ndarray:
    """Rows [steps, LAYERS, EXPERTS] of which expert 1 of layer 0 gets many."""
    rows = np.random.default_rng(seed).poisson(6.0, (steps, LAYERS, EXPERTS)).astype(np.int32)
    rows[:, 0, 1] += 40
    return rows


def report_of(epoch: int = 2, *, steps: int = 20) -> dict[str, Any]:
    """A decode pool of one instance in its third epoch that has lived for ``steps`` passes."""
    placement = ExpertPlacement.initial(
        layers=LAYERS, num_experts=EXPERTS, ranks=RANKS, slots_per_rank=SLOTS
    )
    made = figures(rows_of(steps), placement.slots)
    move = {
        "epoch": epoch,
        "outcome": "moved",
        "reason": "gain 12.00% for 7 slots",
        "time_s": 4.2,
        "step": 11,
        "in_force_step": 13,
        "balance_before": 0.61,
        "predicted_balance": 0.93,
        "achieved_balance": 0.9,
        "moved_bytes": 2_750_000,
        "moved_experts": 7,
        "plan_s": 0.02,
        "move_s": 0.31,
        "stall_s": 0.0004,
    }
    instance = {
        "instance": 0,
        "num_experts": EXPERTS,
        "expert_bytes": 393_216,
        "epoch": epoch,
        "placement": placement.slots.tolist(),
        "last_step": steps - 1,
        "window_steps": steps,
        "rank_rows": made["rank_rows"],
        "balance_by_layer": made["balance_by_layer"],
        "balance": made["balance"],
        "predicted_balance": 0.93,
        "achieved_balance": 0.9,
        "moved_bytes": 2_750_000,
        "moved_experts": 7,
        "flips": 6,
        "abandoned": 1,
        "stall_s": 0.0004,
        "history": [move],
        "series": {
            "steps": list(range(steps)),
            "rows": [100] * steps,
            "balance": [0.6] * steps,
            "epoch": [0] * steps,
        },
    }
    return {"decode": {"enabled": True, "restarted": False, "instances": [instance]}}


class FakeReporter:
    """A pool whose ring keeps ``window`` of the passes that ``advance`` adds."""

    def __init__(self, window: int = 50) -> None:
        self._window = window
        self._rows = rows_of(0)
        self.reports = 0

    def advance(self, steps: int) -> np.ndarray:
        new = rows_of(steps, seed=len(self._rows))
        self._rows = np.concatenate([self._rows, new])
        return new

    def eplb_report(self) -> dict[str, Any]:
        self.reports += 1
        return report_of()

    def expert_series(self, pool: str, since: int = 0) -> list[Piece]:
        assert pool == "decode"
        first = max(since, len(self._rows) - self._window)
        return [(np.arange(first, len(self._rows)), self._rows[first:])]

"""Whether to move experts, and where to: what the EPLB actor and ``headrace eplb replay`` decide with. Pure.

rows seen --forecast--> rows expected --make_plan--> a placement --decide--> worth its bytes?
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .config import EplbConfig
from .decide import decide
from .forecast import forecast
from .measure import peak_over_mean, peaks
from .plan import PlanLimits, make_plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proposal:
    """A placement ``slots`` int32 [layers, ranks, S], and whether it ``pays``.

    Balances are those of the expected rows, ``before_balance`` under the placement in force. ``moved`` slots have to be
    filled.
    """

    slots: NDArray[np.int32]
    predicted_balance: float
    before_balance: float
    moved: int
    moved_bytes: int
    plan_s: float
    pays: bool
    reason: str


class Rebalancer:
    """Decides for one instance of ``ranks`` with ``slots_per_rank`` expert slots in every layer."""

    def __init__(
        self, config: EplbConfig, *, ranks: int, slots_per_rank: int, expert_bytes: int
    ) -> None:
        self._config = config
        self._ranks, self._slots_per_rank = ranks, slots_per_rank
        self._expert_bytes = expert_bytes

    def consider(self, rows: NDArray[np.generic], present: NDArray[np.integer]) -> Proposal:
        """A decision from the last passes, ``rows`` [steps, layers, experts], under ``present`` [layers, ranks, S].

        Raises ConfigError where the two do not fit each other.
        """
        config = self._config
        if len(rows) < config.min_steps or not np.any(rows):
            return Proposal(
                slots=present.astype(np.int32),
                predicted_balance=1.0,
                before_balance=1.0,
                moved=0,
                moved_bytes=0,
                plan_s=0.0,
                pays=False,
                reason=f"{len(rows)} passes seen, {config.min_steps} with rows are needed",
            )
        expected = forecast(rows)
        rows_of_rank = float(expected.sum()) / (len(expected) * expected.shape[1] * self._ranks)
        cost_rows = config.move_cost_passes * rows_of_rank
        limits = PlanLimits(
            ranks=self._ranks,
            slots_per_rank=self._slots_per_rank,
            ranks_per_domain=config.ranks_per_domain,
            deadline_s=config.plan_s,
            move_cost=cost_rows * len(expected) / config.horizon_steps,
        )
        planned = make_plan(expected, limits, present)
        decision = decide(
            peak_now=float(peaks(expected, present).sum(1).mean()),
            peak_planned=float(peaks(expected, planned.slots).sum(1).mean()),
            moved=planned.moved,
            expert_bytes=self._expert_bytes,
            horizon_steps=config.horizon_steps,
            min_gain=config.min_gain,
            rows_per_byte=cost_rows / self._expert_bytes,
        )
        return Proposal(
            slots=planned.slots,
            predicted_balance=1 / peak_over_mean(expected, planned.slots),
            before_balance=1 / peak_over_mean(expected, present),
            moved=planned.moved,
            moved_bytes=decision.moved_bytes,
            plan_s=planned.seconds,
            pays=decision.pays,
            reason=decision.reason,
        )

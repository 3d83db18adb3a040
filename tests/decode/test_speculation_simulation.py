"""Scheduled verification against fixed numbers of drafts, on machines that are formulas and drafts that are coins.

Step N decides by survivals of step N-2, and verifies by those of step N-1, as the overlapped loop does. All schedules
see the same coins, so their difference is not luck.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from headrace.decode.cost_table import CostTable, Floats
from headrace.decode.step_cost import StepCost
from headrace.decode.survival import SurvivalPool, distribute
from headrace.decode.verify_budget import Drafting, RankLoad, choose

NUM_DRAFTS = 5
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FIXED = (0, 1, 3, 5)


def machine(fixed_s: float, row_s: float, draft_s: float, draft_request_s: float) -> StepCost:
    return StepCost(
        forward=CostTable(SIZES, (0,), [[fixed_s + row_s * r] for r in SIZES]),
        sample=CostTable(SIZES, (0,), [[2e-5 * r] for r in SIZES]),
        draft=CostTable(SIZES, (0,), [[draft_s + draft_request_s * r] for r in SIZES]),
    )


MACHINES = {
    "rows almost free": machine(1e-2, 2e-5, 5e-4, 1e-5),
    "rows cost": machine(3e-3, 2.5e-4, 1e-3, 5e-5),
    "rows and drafting dear": machine(1e-3, 4e-4, 1e-3, 3e-4),
}


class Drafts:
    """Confidences of every step, [R, 5], and the coins that decide; ``bias`` > 0 makes confidences boast."""

    def __init__(self, requests: int, steps: int, level: float, bias: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        shape = (steps, requests, NUM_DRAFTS)
        logits = rng.normal(level, 1.0, (1, requests, 1)) + rng.normal(0.0, 1.0, shape)
        logits += rng.normal(0.0, 1.0, (steps, requests, 1))
        self.confidences = 1.0 / (1.0 + np.exp(-logits - bias))
        self.accepted = np.cumprod(rng.random(shape) < 1.0 / (1.0 + np.exp(-logits)), axis=2)


class Schedule:
    """What the ranks of an instance do with their drafts: all of ``fixed`` many, or by confidence for None."""

    def __init__(self, ranks: Sequence[int], cost: StepCost, fixed: int | None) -> None:
        self._ranks, self._cost, self._fixed = ranks, cost, fixed
        self._pools = [SurvivalPool(NUM_DRAFTS) for _ in ranks]
        self._drafting = Drafting()
        self._thresholds: Sequence[float] = [0.0] * len(ranks)

    def plan(self) -> bool:
        """Whether the step makes drafts."""
        if self._fixed is not None:
            return self._fixed > 0
        loads = [
            RankLoad.of(pool, self._cost, num_requests=n, context_tokens=0)
            for pool, n in zip(self._pools, self._ranks, strict=True)
        ]
        budget = choose(loads)
        self._thresholds = budget.min_survivals
        self._drafting = self._drafting.next(budget.gain, sum(self._ranks))
        return self._drafting.draft

    def counts(self, rank: int, confidences: Floats) -> np.ndarray:
        """Drafts to verify of each request."""
        if self._fixed is not None:
            return np.full(len(confidences), self._fixed)
        available = [NUM_DRAFTS] * len(confidences)
        return np.array(
            distribute(confidences.tolist(), available, self._thresholds[rank]), dtype=int
        )

    def learn(self, rank: int, promised: float, accepted: int) -> None:
        self._pools[rank].learn(promised, accepted)

    def observe(self, rank: int, confidences: Floats) -> None:
        self._pools[rank].observe(confidences.tolist())


def tokens_per_s(
    ranks: Sequence[int],
    cost: StepCost,
    fixed: int | None,
    *,
    level: float,
    bias: float = 0.0,
    steps: int = 400,
) -> float:
    drafts = [Drafts(n, steps, level, bias, seed=r) for r, n in enumerate(ranks)]
    schedule = Schedule(ranks, cost, fixed)
    made = [False] * steps
    tokens = seconds = 0.0
    for step in range(steps):
        if step >= 2 and made[step - 2]:
            for rank in range(len(ranks)):
                schedule.observe(rank, drafts[rank].confidences[step - 2])
        made[step] = schedule.plan()
        step_s = 0.0
        for rank, requests in enumerate(ranks):
            verified = np.zeros((requests, NUM_DRAFTS), dtype=bool)
            if step and made[step - 1]:
                confidences = drafts[rank].confidences[step - 1]
                counts = schedule.counts(rank, confidences)
                verified = np.arange(NUM_DRAFTS) < counts[:, None]
                accepted = int(drafts[rank].accepted[step - 1][verified].sum())
                promised = float(np.cumprod(confidences, axis=1)[verified].sum())
                schedule.learn(rank, promised, accepted)
                tokens += accepted
            tokens += requests
            step_s = max(step_s, float(cost.step_seconds(requests + verified.sum(), 0.0)))
        seconds += step_s
        if made[step]:
            seconds += max(cost.draft_seconds(n) for n in ranks)
    return tokens / seconds


@pytest.mark.parametrize("level", [-1.0, 1.0, 2.5], ids="level {}".format)
@pytest.mark.parametrize("ranks", [(1,), (8,), (32,), (128,), (8, 64)], ids=str)
@pytest.mark.parametrize("cost", MACHINES.values(), ids=list(MACHINES))
def test_the_schedule_keeps_up_with_the_best_fixed_number(
    cost: StepCost, ranks: tuple[int, ...], level: float
) -> None:
    steps = 800 if sum(ranks) == 1 else 250
    best = max(tokens_per_s(ranks, cost, n, level=level, steps=steps) for n in FIXED)
    assert tokens_per_s(ranks, cost, None, level=level, steps=steps) > 0.97 * best


def test_the_schedule_beats_every_fixed_number_where_drafts_differ() -> None:
    cost = MACHINES["rows almost free"]
    for ranks in ((16,), (64,), (8, 64)):
        best = max(tokens_per_s(ranks, cost, n, level=1.0) for n in FIXED)
        assert tokens_per_s(ranks, cost, None, level=1.0) > 1.03 * best


@pytest.mark.parametrize("bias", [-1.5, 1.5])
@pytest.mark.parametrize("requests", [8, 32, 128])
def test_wrong_confidences_cost_little(requests: int, bias: float) -> None:
    cost = MACHINES["rows cost"]
    for level in (-1.0, 1.0):
        best = max(tokens_per_s((requests,), cost, n, level=level) for n in FIXED)
        assert tokens_per_s((requests,), cost, None, level=level, bias=bias) > 0.97 * best

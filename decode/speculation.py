"""A rank's part in deciding how many drafts the next step verifies, and whether it makes new ones.

load ----gathered over the instance----> budget ---> the step ---> observe: what it cost, what was accepted
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .counters import StepRecord
from .lane import Outcome
from .speculation_config import SpeculationConfig
from .step_cost import StepCost, unmeasured
from .survival import SurvivalPool
from .verify_budget import Budget, Drafting, RankLoad, affordable_requests, choose


@dataclass(frozen=True, slots=True)
class StepBudget:
    """A step verifies up to ``max_drafts`` of a request, those that survive with at least ``min_survival``."""

    max_drafts: int
    min_survival: float
    draft: bool


_REFRESH_STEPS = 4
"""A rank's load is worked out anew after so many steps, or when its number of requests changed."""


class Speculation:
    """Decides for rank ``rank`` of an instance. ``num_drafts`` 0 never speculates; ``free`` drafts are always made."""

    def __init__(
        self,
        config: SpeculationConfig,
        num_drafts: int,
        cost: StepCost | None,
        *,
        free: bool,
        rank: int,
    ) -> None:
        self._config = config
        self._num_drafts = num_drafts
        self._cost = cost or unmeasured()
        self._free = free
        self._rank = rank
        self._pool = SurvivalPool(num_drafts)
        self._drafting = Drafting()
        self._load: tuple[int, list[float]] = (-1, [])
        self._load_age = 0
        self._chosen: tuple[Sequence[Sequence[float]], Budget, int] | None = None

    def load(self, num_requests: int, context_tokens: int) -> list[float]:
        """What the other ranks need to know of us: RankLoad.to_vector, some steps old at most."""
        self._load_age += 1
        if self._load[0] != num_requests or self._load_age >= _REFRESH_STEPS:
            found = RankLoad.of(
                self._pool, self._cost, num_requests=num_requests, context_tokens=context_tokens
            )
            self._load, self._load_age = (num_requests, found.to_vector()), 0
        return self._load[1]

    def budget(self, loads: Sequence[Sequence[float]]) -> StepBudget:
        """Of the next step of an instance whose ranks have ``loads``."""
        if not self._num_drafts:
            return StepBudget(0, 0.0, draft=False)
        if self._config.schedule == "fixed":
            return StepBudget(self._num_drafts, 0.0, draft=True)
        if self._chosen is None or self._chosen[0] != loads:
            told = [RankLoad.from_vector(load) for load in loads]
            best = choose(told, self._config.min_tokens_per_s)
            self._chosen = (loads, best, sum(load.num_requests for load in told))
        _, chosen, num_requests = self._chosen
        self._drafting = self._drafting.next(chosen.gain, num_requests)
        return StepBudget(
            self._num_drafts,
            chosen.min_survivals[self._rank],
            draft=self._free or self._drafting.draft,
        )

    def max_requests(self, most: int, context_tokens: int) -> int:
        """How many requests, up to ``most``, can all have the speed that the configuration promises."""
        floor = self._config.min_tokens_per_s
        if floor is None:
            return most
        return affordable_requests(self._pool, self._cost, context_tokens, floor, most)

    def observe(
        self,
        record: StepRecord,
        context_tokens: int,
        outcomes: Sequence[Outcome],
        confidences: Sequence[Sequence[float]] | None,
    ) -> None:
        """Learn from a step in which nothing was recomputed; ``confidences`` are of the drafts that it made, if any."""
        context = context_tokens / record.num_requests
        self._cost.forward.observe(record.num_rows, context, record.forward_s)
        self._cost.sample.observe(record.num_rows, 0, record.sample_s)
        self._pool.learn(
            sum(outcome.promised for outcome in outcomes),
            sum(outcome.num_right for outcome in outcomes),
        )
        if confidences is not None:
            self._cost.draft.observe(record.num_requests, 0, record.draft_s)
            self._pool.observe(confidences)

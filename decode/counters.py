"""What a decode rank counts, always: totals, drafts by position, and the last steps one by one."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

KEPT_STEPS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step: how much it ran and gave, and seconds of its parts."""

    num_requests: int
    num_rows: int
    num_replayed: int
    num_tokens: int
    plan_s: float
    forward_s: float
    sample_s: float
    draft_s: float


class Counters:
    """Counts since the start; medians are over the last ``KEPT_STEPS`` steps."""

    def __init__(self, num_drafts: int) -> None:
        self.num_steps = self.num_tokens = self.num_rows = self.num_replayed = 0
        self.num_finished = self.num_failed = 0
        self.num_turns = 0
        self.verified = [0] * num_drafts
        """Drafts verified, by position after the anchor."""
        self.accepted = [0] * num_drafts
        """Of them, accepted."""
        self.records: deque[StepRecord] = deque(maxlen=KEPT_STEPS)

    def step(self, record: StepRecord, drafts: Sequence[tuple[int, int]]) -> None:
        """One step more; ``drafts`` are (verified, accepted) of each of its requests."""
        self.records.append(record)
        self.num_steps += 1
        self.num_turns += record.num_requests
        self.num_tokens += record.num_tokens
        self.num_rows += record.num_rows
        self.num_replayed += record.num_replayed
        for num_verified, num_accepted in drafts:
            for place in range(num_verified):
                self.verified[place] += 1
            for place in range(num_accepted):
                self.accepted[place] += 1

    def stats(self) -> dict[str, float | list[int]]:
        """Plain values; ``mean_accepted`` is tokens per request and step."""
        return {
            "steps": self.num_steps,
            "tokens": self.num_tokens,
            "rows": self.num_rows,
            "recomputed_rows": self.num_replayed,
            "finished": self.num_finished,
            "failed": self.num_failed,
            "verified_by_position": list(self.verified),
            "accepted_by_position": list(self.accepted),
            "mean_accepted": self.num_tokens / self.num_turns if self.num_turns else 0.0,
            "step_ms_p50": 1e3
            * self._median([r.forward_s + r.sample_s + r.draft_s for r in self.records]),
            "planner_us_p50": 1e6 * self._median([r.plan_s for r in self.records]),
        }

    def _median(self, values: Sequence[float]) -> float:
        return median(values) if values else 0.0

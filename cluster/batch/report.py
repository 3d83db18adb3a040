"""What a batch came to: counts, tokens, rates and latency percentiles, as a table and as a JSON document."""

import math
from collections import Counter

from rich.table import Table

from .records import Outcome

_SMALLEST_S = 1e-6
_GROWTH = 1.01


class Latencies:
    """Percentiles of any number of durations in bounded memory: buckets that grow by 1 %, so values are good to 1 %."""

    def __init__(self) -> None:
        self._buckets = Counter[int]()
        self._size = 0

    def add(self, seconds: float) -> None:
        """Counts one duration in seconds."""
        self._buckets[round(math.log(max(seconds, _SMALLEST_S) / _SMALLEST_S, _GROWTH))] += 1
        self._size += 1

    def percentile_s(self, percent: float) -> float | None:
        """The duration in seconds that ``percent`` of all do not exceed; None when there are none."""
        left = math.ceil(self._size * percent / 100)
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return _SMALLEST_S * _GROWTH**bucket
        return None


class Totals:
    """Sums over outcomes."""

    def __init__(self) -> None:
        self.answered = 0
        self.failures = Counter[str]()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.drafts_verified = 0
        self.drafts_accepted = 0
        self.ttft = Latencies()
        self.tpot = Latencies()

    @property
    def failed(self) -> int:
        """Lines that ended as error lines."""
        return self.failures.total()

    @property
    def lines(self) -> int:
        """Lines that ended at all."""
        return self.answered + self.failed

    def add(self, outcome: Outcome) -> None:
        """Counts one outcome."""
        if outcome.error_code is not None:
            self.failures[outcome.error_code] += 1
            return
        self.answered += 1
        if outcome.usage is not None:
            self.prompt_tokens += outcome.usage.prompt_tokens
            self.cached_tokens += outcome.usage.prompt_tokens_details.cached_tokens
            self.output_tokens += outcome.usage.completion_tokens
        if outcome.timing is not None:
            self.drafts_verified += outcome.timing.drafts_verified
            self.drafts_accepted += outcome.timing.drafts_accepted
            self.ttft.add(outcome.timing.ttft_s)
            if outcome.timing.tpot_s is not None:
                self.tpot.add(outcome.timing.tpot_s)


Value = int | float | str | None | dict[str, int]


def summarize(whole: Totals, run: Totals, total_s: float, run_s: float) -> dict[str, Value]:
    """The JSON document: ``whole`` counts every run of the job, rates are those of this run.

    ``run_s`` are the seconds in which requests were answered, ``total_s`` those of the whole command.
    """
    document: dict[str, Value] = {
        "requests": whole.lines,
        "answered": whole.answered,
        "failed": whole.failed,
        "failures_by_code": dict(sorted(whole.failures.items())),
        "requests_of_earlier_runs": whole.lines - run.lines,
        "prompt_tokens": whole.prompt_tokens,
        "cached_tokens": whole.cached_tokens,
        "output_tokens": whole.output_tokens,
        "drafts_verified": whole.drafts_verified,
        "drafts_accepted": whole.drafts_accepted,
        "total_s": round(total_s, 3),
        "run_s": round(run_s, 3),
        "run_requests_per_s": _rate(run.lines, run_s),
        "run_prompt_tokens_per_s": _rate(run.prompt_tokens, run_s),
        "run_output_tokens_per_s": _rate(run.output_tokens, run_s),
    }
    for name, latencies in (("ttft", whole.ttft), ("tpot", whole.tpot)):
        for percent in (50, 95, 99):
            value = latencies.percentile_s(percent)
            document[f"{name}_p{percent}_s"] = None if value is None else float(f"{value:.3g}")
    return document


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 2) if seconds > 0 else 0.0


def render(document: dict[str, Value], output: str) -> Table:
    """The closing table."""
    table = Table(title=f"batch -> {output}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    earlier = document["requests_of_earlier_runs"]
    table.add_row(
        "requests", f"{document['requests']}" + (f" ({earlier} by earlier runs)" if earlier else "")
    )
    codes = document["failures_by_code"]
    reasons = (
        ", ".join(f"{code} {count}" for code, count in codes.items())
        if isinstance(codes, dict)
        else ""
    )
    table.add_row("failures", f"{document['failed']}" + (f" ({reasons})" if reasons else ""))
    cached = f", {document['cached_tokens']} from the cache" if document["cached_tokens"] else ""
    table.add_row("prompt tokens", f"{document['prompt_tokens']}{cached}")
    table.add_row("output tokens", f"{document['output_tokens']}")
    if document["drafts_verified"]:
        table.add_row(
            "drafts accepted", f"{document['drafts_accepted']} of {document['drafts_verified']}"
        )
    table.add_row(
        "time of this run", f"{document['run_s']} s, with start and end {document['total_s']} s"
    )
    table.add_row("prompt tokens/s", f"{document['run_prompt_tokens_per_s']}")
    table.add_row("output tokens/s", f"{document['run_output_tokens_per_s']}")
    for name in ("ttft", "tpot"):
        values = [document[f"{name}_p{percent}_s"] for percent in (50, 95, 99)]
        table.add_row(f"{name.upper()} p50 / p95 / p99", _durations(values))
    return table


def _durations(values: list[Value]) -> str:
    """Several durations in the unit that suits the largest."""
    numbers = [value for value in values if isinstance(value, int | float)]
    if not numbers:
        return "-"
    factor, unit = (1, "s") if max(numbers) >= 10 else (1000, "ms")
    return " / ".join(f"{number * factor:.1f}" for number in numbers) + f" {unit}"

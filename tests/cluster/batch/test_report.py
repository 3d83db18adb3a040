"""Percentiles in bounded memory, and what the closing report says."""

import io
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.cluster.batch.bookkeeping import LineSet, SeenIds
from headrace.cluster.batch.records import Outcome, Timing, Usage
from headrace.cluster.batch.report import Latencies, Totals, render, summarize


@pytest.mark.parametrize("percent", [50, 95, 99, 100])
def test_percentiles_are_good_to_one_percent(percent: int):
    rng = random.Random(5)
    values = sorted(rng.lognormvariate(-2, 2) for _ in range(5000))
    latencies = Latencies()
    for value in values:
        latencies.add(value)
    exact = values[-(-len(values) * percent // 100) - 1]
    assert latencies.percentile_s(percent) == pytest.approx(exact, rel=0.01)


def test_no_durations_have_no_percentile():
    assert Latencies().percentile_s(50) is None


def outcome(line: int, *, failed: bool = False) -> Outcome:
    if failed:
        return Outcome(line=line, custom_id=None, error_code="invalid_json")
    timing = Timing(ttft_s=0.5, total_s=1.0, tpot_s=0.01)
    return Outcome(line=line, custom_id="a", error_code=None, usage=Usage(10, 5, 15), timing=timing)


def test_the_report_covers_all_runs_and_rates_this_one():
    whole, run = Totals(), Totals()
    for line in range(10):
        whole.add(outcome(line, failed=line < 2))
        if line >= 5:
            run.add(outcome(line))
    document = summarize(whole, run, 4.0, 2.0)
    assert json.loads(json.dumps(document)) == document
    assert document["requests"] == 10
    assert (document["answered"], document["failed"]) == (8, 2)
    assert document["failures_by_code"] == {"invalid_json": 2}
    assert document["requests_of_earlier_runs"] == 5
    assert (document["prompt_tokens"], document["output_tokens"]) == (80, 40)
    assert document["run_output_tokens_per_s"] == 12.5
    assert document["ttft_p99_s"] == pytest.approx(0.5, rel=0.01)
    text = io.StringIO()
    Console(width=100, file=text).print(render(document, "out.jsonl"))
    assert "10 (5 by earlier runs)" in text.getvalue()


def test_a_report_of_nothing():
    document = summarize(Totals(), Totals(), 0.0, 0.0)
    assert document["ttft_p50_s"] is None
    assert document["run_requests_per_s"] == 0.0
    render(document, "out.jsonl")


@given(st.lists(st.integers(1, 10**12)))
def test_a_line_set_is_a_set(lines: list[int]):
    members = LineSet()
    for at, line in enumerate(lines):
        assert members.add(line) == (line not in lines[:at])
    assert len(members) == len(set(lines))
    assert all(line in members for line in lines)
    assert (10**12 + 1) not in members


def test_ids_are_claimed_once():
    seen = SeenIds()
    assert [seen.claim(name) for name in ("a", "b", "a", "ä", "ä")] == [
        True,
        True,
        False,
        True,
        False,
    ]
    seen.close()

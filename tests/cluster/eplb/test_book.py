"""The book of an instance: what it reports is what was put in, and what shows a report can read it."""

import io
import json
from dataclasses import replace

import numpy as np
from rich.console import Console

from headrace.cluster.eplb.book import InstanceBook
from headrace.cluster.eplb.config import EplbConfig
from headrace.cluster.eplb.measure import peak_over_mean
from headrace.cluster.eplb.policy import Rebalancer
from headrace.cluster.eplb.show import render_report
from headrace.model.placement import ExpertPlacement

from .reports import EXPERTS, LAYERS, RANKS, SLOTS, report_of, rows_of

PRESENT = ExpertPlacement.initial(
    layers=LAYERS, num_experts=EXPERTS, ranks=RANKS, slots_per_rank=SLOTS
).slots


def book() -> InstanceBook:
    return InstanceBook(0, num_experts=EXPERTS, expert_bytes=100, window=30)


def test_an_empty_book_reports_nothing_and_can_be_shown():
    found = book().report(PRESENT, 0, {})
    assert found.keys() == report_of()["decode"]["instances"][0].keys()
    assert found["balance"] is None
    assert book().recent().shape == (0, 1, EXPERTS)
    text = io.StringIO()
    shown = render_report({"decode": {"enabled": False, "restarted": False, "instances": [found]}})
    Console(file=text).print(shown)
    assert "no rows yet" in text.getvalue()


def test_passes_are_counted_once():
    kept, rows = book(), rows_of(50)
    kept.add(np.arange(20), rows[:20], PRESENT, 0)
    kept.add(np.arange(10, 50), rows[10:], PRESENT, 0)
    kept.add(np.arange(40, 50), rows[40:], PRESENT, 0)
    found = kept.report(PRESENT, 0, {})
    assert found["series"]["steps"] == list(range(50))
    assert found["last_step"] == 49
    assert found["window_steps"] == 30
    assert found["balance"] == round(1 / peak_over_mean(rows[20:], PRESENT), 4)
    one = [round(1 / peak_over_mean(rows[step : step + 1], PRESENT), 4) for step in range(50)]
    assert found["series"]["balance"] == one
    assert json.loads(json.dumps(found)) == found


def test_a_move_has_its_prediction_and_its_outcome():
    kept, rows = book(), rows_of(80)
    kept.add(np.arange(40), rows[:40], PRESENT, 0)
    brain = Rebalancer(EplbConfig(), ranks=RANKS, slots_per_rank=SLOTS, expert_bytes=100)
    proposal = brain.consider(kept.recent(), PRESENT)
    assert proposal.pays
    kept.decided(proposal, epoch=1, time_s=3.0)
    kept.add(np.arange(40, 45), rows[40:45], PRESENT, 0)
    kept.in_force(1, step=45, time_s=3.5, stall_s=0.002)
    kept.add(np.arange(45, 80), rows[45:], proposal.slots, 1)
    found = kept.report(proposal.slots, 1, {"moved_experts": proposal.moved})
    (entry,) = found["history"]
    assert (entry["outcome"], entry["step"], entry["in_force_step"]) == ("moved", 40, 45)
    assert entry["move_s"] == 0.5
    achieved = round(1 / peak_over_mean(rows[45:], proposal.slots), 4)
    assert entry["achieved_balance"] == found["achieved_balance"] == achieved
    assert found["predicted_balance"] == round(proposal.predicted_balance, 4)
    assert achieved > 1 / peak_over_mean(rows[45:], PRESENT)
    assert found["series"]["epoch"] == [0] * 45 + [1] * 35


def test_what_a_plan_achieved_outlives_its_passes():
    kept, rows = InstanceBook(0, num_experts=2, expert_bytes=100, window=30), np.array([[[3, 1]]])
    even, uneven = np.array([[[0, 1], [0, 1]]]), np.array([[[0, -1], [1, -1]]])
    brain = Rebalancer(EplbConfig(), ranks=2, slots_per_rank=2, expert_bytes=100)
    proposal = replace(brain.consider(rows, uneven), pays=True)
    for epoch, (slots, first, passes) in enumerate([(even, 0, 5), (uneven, 5, 20_000)]):
        kept.decided(proposal, epoch=epoch, time_s=0.0)
        kept.in_force(epoch, step=first, time_s=0.0)
        steps = np.arange(first, first + passes)
        kept.add(steps, np.repeat(rows, passes, 0).astype(np.int32), slots, epoch)
        found = kept.report(slots, epoch, {})
    assert found["series"]["steps"][0] == 5
    assert [entry["achieved_balance"] for entry in found["history"]] == [1.0, 0.6667]


def test_a_plan_that_was_given_up_says_so():
    kept = book()
    kept.add(np.arange(40), rows_of(40), PRESENT, 0)
    brain = Rebalancer(EplbConfig(), ranks=RANKS, slots_per_rank=SLOTS, expert_bytes=100)
    kept.decided(brain.consider(kept.recent(), PRESENT), epoch=1, time_s=1.0)
    kept.dropped(1, "rank 2 was lost", time_s=1.5)
    found = kept.report(PRESENT, 0, {"abandoned": 1})
    assert found["history"][0]["outcome"] == "abandoned"
    assert found["history"][0]["reason"] == "rank 2 was lost"
    assert found["abandoned"] == 1
    assert found["predicted_balance"] is None

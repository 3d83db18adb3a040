"""What the replay decides with: literal rows in, a decision out."""

import numpy as np
import pytest

from headrace.cluster.eplb.config import EplbConfig
from headrace.cluster.eplb.measure import moved_slots, peak_over_mean
from headrace.cluster.eplb.policy import Rebalancer
from headrace.model.placement import ExpertPlacement
from headrace.transfer.errors import ConfigError

PRESENT = ExpertPlacement.initial(layers=2, num_experts=8, ranks=4, slots_per_rank=3).slots


def brain(**keys: float) -> Rebalancer:
    return Rebalancer(EplbConfig(**keys), ranks=4, slots_per_rank=3, expert_bytes=500)


def rows_of(steps: int = 40) -> np.ndarray:
    """Experts 6 and 7, which share rank 3, get most rows."""
    rows = np.random.default_rng(1).poisson(10.0, (steps, 2, 8))
    rows[:, :, 6:] += 60
    return rows


def test_a_gain_pays():
    found = brain().consider(rows_of(), PRESENT)
    assert found.pays
    assert found.moved == moved_slots(found.slots, PRESENT) > 0
    assert found.moved_bytes == 500 * found.moved
    assert found.predicted_balance > found.before_balance + 0.2
    assert 1 / peak_over_mean(rows_of(), found.slots) > 1 / peak_over_mean(rows_of(), PRESENT) + 0.2
    ExpertPlacement(num_experts=8, slots=found.slots)


def test_what_is_in_force_is_not_moved_again():
    slots = brain().consider(rows_of(), PRESENT).slots
    again = brain().consider(rows_of(), slots)
    assert not again.pays


def test_moving_that_costs_more_than_it_saves_does_not_pay():
    assert not brain(move_cost_passes=1e9).consider(rows_of(), PRESENT).pays
    assert not brain(min_gain=0.9).consider(rows_of(), PRESENT).pays


def test_too_few_passes_decide_nothing():
    found = brain(min_steps=20).consider(rows_of(19), PRESENT)
    assert not found.pays
    assert "19 passes seen" in found.reason
    assert (found.slots == PRESENT).all()
    assert brain(min_steps=20).consider(rows_of(20), PRESENT).pays
    assert not brain(min_steps=2).consider(np.zeros((5, 2, 8), int), PRESENT).pays


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"plan_s": 0}, "plan_s = 0"),
        ({"plan_s": float("nan")}, "plan_s = nan"),
        ({"min_steps": 0}, "min_steps = 0"),
        ({"min_gain": 1}, "min_gain = 1"),
        ({"move_cost_passes": -1}, "move_cost_passes = -1"),
        ({"bandwidth_mib_per_s": float("inf")}, "bandwidth_mib_per_s = inf"),
        ({"ranks_per_domain": 0}, "ranks_per_domain = 0"),
    ],
)
def test_a_value_that_cannot_serve_is_named(keys: dict[str, float], said: str):
    with pytest.raises(ConfigError, match=said):
        EplbConfig(**keys)

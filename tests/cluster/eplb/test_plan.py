"""Plans on small instances: valid, never below the bound, better than the published algorithms, cheap to keep."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.cluster.eplb.baselines import contiguous, deepinfer, deepseek
from headrace.cluster.eplb.loads import LOADS, make_load
from headrace.cluster.eplb.measure import moved_slots, peak_over_mean
from headrace.cluster.eplb.plan import PlanLimits, make_plan, warm_up
from headrace.model.placement import ExpertPlacement
from headrace.transfer.errors import ConfigError

LAYERS, EXPERTS, RANKS, SLOTS, STEPS = 2, 64, 16, 5, 60


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    warm_up()


def series(kind: str, steps: int, layers: int, experts: int, seed: int) -> NDArray[np.generic]:
    return make_load(
        kind, steps=steps, layers=layers, experts=experts, assignments=20_000, seed=seed
    )


def load(kind: str, seed: int = 0) -> NDArray[np.generic]:
    return series(kind, STEPS, LAYERS, EXPERTS, seed)


def limits(**changes: float) -> PlanLimits:
    given_limits = {"ranks": RANKS, "slots_per_rank": SLOTS, "deadline_s": 0.3, **changes}
    return PlanLimits(**given_limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", list(LOADS))
def test_a_plan_beats_both_published_algorithms_and_keeps_to_its_bound(kind: str) -> None:
    rows = load(kind)
    planned = make_plan(rows, limits())
    ExpertPlacement(num_experts=EXPERTS, slots=planned.slots)  # raises for a plan that cannot serve
    found = peak_over_mean(rows, planned.slots)
    assert found == pytest.approx(planned.peak_over_mean, rel=1e-5)
    assert 1.0 <= planned.bound <= found * (1 + 1e-6)
    for other in (deepseek, deepinfer):
        assert found < peak_over_mean(rows, other(rows, RANKS, SLOTS)) * (1 + 1e-6)


@pytest.mark.parametrize("kind", ["steady_0.8", "steady_1.2"])
def test_stationary_loads_come_within_a_percent_of_the_bound(kind: str) -> None:
    planned = make_plan(load(kind), limits())
    assert planned.peak_over_mean <= 1.01 * planned.bound


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(2, 8),
    st.integers(1, 6),
)
def test_any_small_instance_gets_a_valid_plan(
    seed: int, ranks: int, spare: int, experts: int, steps: int
) -> None:
    rows = np.random.default_rng(seed).integers(0, 9, (steps, 1, experts))
    slots = min(experts, -(-experts // ranks) + spare - 1)
    planned = make_plan(rows, limits(ranks=ranks, slots_per_rank=slots, deadline_s=0.05))
    ExpertPlacement(num_experts=experts, slots=planned.slots)
    if rows.sum():
        assert planned.bound <= peak_over_mean(rows, planned.slots) * (1 + 1e-6)


def test_the_bound_is_below_every_placement_of_a_tiny_instance() -> None:
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 20, (4, 1, 3))
    planned = make_plan(rows, limits(ranks=2, slots_per_rank=2))
    best = min(
        peak_over_mean(rows, np.array([[[a, b], [c, d]]], np.int32))
        for a in range(3)
        for b in range(3)
        for c in range(3)
        for d in range(3)
        if {a, b, c, d} == {0, 1, 2} and a != b and c != d
    )
    assert planned.bound <= best * (1 + 1e-6)
    assert planned.peak_over_mean == pytest.approx(best, rel=1e-5)


def test_a_drifting_load_moves_a_fifth_of_the_slots_at_the_same_balance() -> None:
    rows = series("drift", 2 * STEPS, LAYERS, EXPERTS, 3)
    before = make_plan(rows[:STEPS], limits()).slots
    later = rows[STEPS // 4 : STEPS + STEPS // 4]
    fresh = make_plan(later, limits())
    mean = later.sum() / STEPS / LAYERS / RANKS
    kept = make_plan(later, limits(move_cost=0.3 * float(mean)), before)
    assert moved_slots(before, kept.slots) == kept.moved
    assert 5 * kept.moved <= moved_slots(before, fresh.slots)
    assert kept.peak_over_mean <= 1.03 * fresh.peak_over_mean


def test_a_plan_that_is_dear_to_move_stays() -> None:
    rows = load("zipf_0.8")
    present = contiguous(LAYERS, EXPERTS, RANKS, SLOTS)
    assert make_plan(rows, limits(move_cost=1e12), present).moved == 0


def test_the_deadline_is_kept() -> None:
    rows = series("bursts", 100, 8, 256, 0)
    began = time.perf_counter()
    make_plan(rows, limits(ranks=64, slots_per_rank=5, deadline_s=0.3))
    assert time.perf_counter() - began < 2.0


def test_bad_limits_and_rows_are_named() -> None:
    with pytest.raises(ConfigError, match="ranks is 0"):
        limits(ranks=0)
    with pytest.raises(ConfigError, match=r"deadline_s is -1"):
        limits(deadline_s=-1.0)
    with pytest.raises(ConfigError, match="slots"):
        make_plan(load("drift"), limits(ranks=2, slots_per_rank=4))
    broken = load("drift").astype(float)
    broken[0, 0, 0] = np.nan
    with pytest.raises(ConfigError):
        make_plan(broken, limits())

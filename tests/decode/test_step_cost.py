"""Profiles of machines that are formulas, and costs that are kept on disk."""

import os
from pathlib import Path

import numpy as np
import pytest

from headrace.decode.cost_table import CostTable
from headrace.decode.step_cost import (
    LIFETIME_S,
    StepCost,
    cache_key,
    load,
    profile,
    save,
    unmeasured,
)

ROWS, CONTEXTS = (1, 4, 16, 64, 256), (0, 128, 1024, 8192)


class Machine:
    """Takes 1 ms + 10 us a row + 10 ns a row and token of context; every third run is disturbed."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def exact(self, rows: int, context: int) -> float:
        return 1e-3 + 1e-5 * rows + 1e-8 * rows * context

    def __call__(self, rows: int, context: int) -> float:
        self.calls.append((rows, context))
        noise = 7.0 if len(self.calls) % 5 == 0 else 1.0
        return noise * self.exact(rows, context)


def test_a_profile_with_time_measures_every_point_and_drops_outliers() -> None:
    machine = Machine()
    costs = profile(machine, ROWS, CONTEXTS, budget_s=100.0, repeats=5)
    assert set(machine.calls) == {(r, c) for r in ROWS for c in CONTEXTS}
    assert len(machine.calls) == 6 * len(ROWS) * len(CONTEXTS)
    for r in ROWS:
        for c in CONTEXTS:
            assert float(costs.seconds(r, c)) == pytest.approx(machine.exact(r, c))


def test_a_profile_without_time_fits_what_it_skips() -> None:
    machine = Machine()
    costs = profile(machine, ROWS, CONTEXTS, budget_s=0.2, repeats=5)
    spent = sum(machine.exact(*call) for call in machine.calls)
    assert spent < 0.25
    assert (256, 8192) not in machine.calls
    for r in ROWS:
        for c in CONTEXTS:
            assert float(costs.seconds(r, c)) == pytest.approx(machine.exact(r, c), rel=0.02)


def test_a_slow_point_runs_twice_only() -> None:
    machine = Machine()
    profile(machine, ROWS, CONTEXTS, budget_s=0.01, repeats=5)
    assert machine.calls == [(1, 0)] * 2 + [(256, 0)] * 2 + [(1, 8192)] * 2


def test_ranks_that_see_the_same_seconds_measure_the_same_points() -> None:
    first, second = Machine(), Machine()
    for machine in (first, second):
        profile(machine, ROWS, CONTEXTS, budget_s=0.3)
    assert first.calls == second.calls


def test_a_cost_without_context() -> None:
    costs = profile(lambda rows, _: 1e-5 * rows, (1, 8, 64), budget_s=1.0, repeats=3)
    assert costs.seconds([1, 8, 32]).tolist() == pytest.approx([1e-5, 8e-5, 32e-5])


@pytest.mark.parametrize(("repeats", "budget_s"), [(2, 1.0), (5, 0.0), (5, float("nan"))])
def test_bad_profiles_are_refused(repeats: int, budget_s: float) -> None:
    with pytest.raises(ValueError, match=r"repeats = 2|budget_s"):
        profile(Machine(), ROWS, CONTEXTS, budget_s=budget_s, repeats=repeats)


def step_cost() -> StepCost:
    return StepCost(
        forward=CostTable((1, 8), (0, 64), [[1.0, 2.0], [3.0, 5.0]]),
        sample=CostTable((1, 8), (0,), [[0.1], [0.8]]),
        draft=CostTable((1, 8), (0,), [[0.2], [0.3]]),
    )


def test_a_step_is_its_forward_pass_and_its_sampling() -> None:
    cost = step_cost()
    assert cost.step_seconds([1, 8], 0).tolist() == pytest.approx([1.1, 3.8])
    assert cost.step_seconds([0], 0).tolist() == [0.0]
    assert cost.draft_seconds(8) == pytest.approx(0.3)
    assert cost.draft_seconds(0) == 0.0


def test_what_is_unmeasured_is_flat() -> None:
    assert np.ptp(unmeasured().forward.seconds([1, 100, 10000], 99.0)) == 0.0


def test_saved_costs_come_back_until_they_are_old(tmp_path: Path) -> None:
    save(tmp_path, "k", step_cost())
    found = load(tmp_path, "k")
    assert found is not None
    assert found.forward.profiled == [[1.0, 2.0], [3.0, 5.0]]
    assert found.step_seconds([3], 10).tolist() == step_cost().step_seconds([3], 10).tolist()
    written = (tmp_path / "k.json").stat().st_mtime
    assert load(tmp_path, "k", written + LIFETIME_S - 1) is not None
    assert load(tmp_path, "k", written + LIFETIME_S + 1) is None
    assert load(tmp_path, "other") is None
    assert [path.name for path in tmp_path.iterdir()] == ["k.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"forward": 3}', '{"forward": {"rows": []}}', "null"]
)
def test_a_damaged_file_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "k.json").write_text(text)
    assert load(tmp_path, "k") is None


def test_nothing_is_kept_without_a_folder(tmp_path: Path) -> None:
    save(None, "k", step_cost())
    save(tmp_path / "missing", "k", step_cost())
    assert load(None, "k") is None


def test_keys_differ_by_what_they_describe() -> None:
    parts = {"model": "a", "threads": 2}
    assert cache_key(parts) == cache_key(dict(reversed(parts.items())))
    assert cache_key(parts) != cache_key({**parts, "threads": 1})
    assert os.sep not in cache_key(parts)

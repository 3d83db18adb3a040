"""Interpolation and correction of measured costs on literal tables."""

import numpy as np
import pytest

from headrace.decode.cost_table import MIN_SAMPLES, CostTable


def affine(rows: float, context: float) -> float:
    return 3.0 + 0.5 * rows + 0.001 * rows * context


def table() -> CostTable:
    rows, contexts = (1, 4, 16, 64), (0, 128, 1024)
    return CostTable(rows, contexts, [[affine(r, c) for c in contexts] for r in rows])


@pytest.mark.parametrize(
    ("rows", "context"), [(1, 0), (3, 128), (10, 500), (64, 1024), (200, 4000)]
)
def test_what_grows_linearly_is_exact_between_and_beyond_the_points(
    rows: float, context: float
) -> None:
    assert float(table().seconds(rows, context)) == pytest.approx(affine(rows, context))


def test_many_rows_at_once_and_none() -> None:
    found = table().seconds([0, 1, 40], 128)
    assert found.tolist() == pytest.approx([0.0, affine(1, 128), affine(40, 128)])


def test_more_work_never_costs_less() -> None:
    noisy = CostTable((1, 2, 4), (0, 10), [[5.0, 2.0], [3.0, 9.0], [4.0, 1.0]])
    assert noisy.profiled == [[5.0, 5.0], [5.0, 9.0], [5.0, 9.0]]
    sizes = np.linspace(1, 8, 50)
    assert (np.diff(noisy.seconds(sizes, 3.0)) >= 0).all()


def test_one_point_is_a_constant() -> None:
    assert CostTable((1,), (0,), [[2.0]]).seconds([1, 7, 900], 5000).tolist() == [2.0] * 3


def test_a_shift_is_learnt_from_medians_and_outliers_are_not() -> None:
    costs = table()
    before = float(costs.seconds(16, 128))
    for i in range(40):
        measured = 1000.0 * before if i % 5 == 0 else 1.5 * before
        costs.observe(16, 128, measured)
    assert float(costs.seconds(16, 128)) == pytest.approx(1.5 * before)
    # the profile's ratios hold where nothing was measured
    assert float(costs.seconds(64, 0)) == pytest.approx(1.5 * affine(64, 0))


def test_few_samples_do_not_count() -> None:
    costs = table()
    for _ in range(MIN_SAMPLES - 1):
        costs.observe(16, 128, 100.0)
    assert float(costs.seconds(16, 128)) == pytest.approx(affine(16, 128))


def test_points_with_samples_keep_their_own_factor() -> None:
    costs = table()
    for _ in range(20):
        costs.observe(1, 0, 2.0 * affine(1, 0))
        costs.observe(64, 0, 3.0 * affine(64, 0))
    assert float(costs.seconds(1, 0)) == pytest.approx(2.0 * affine(1, 0))
    assert float(costs.seconds(64, 0)) == pytest.approx(3.0 * affine(64, 0))
    assert float(costs.seconds(4, 0)) == pytest.approx(2.0 * affine(4, 0))


def test_old_samples_are_forgotten() -> None:
    costs = table()
    for factor in (4.0, 1.0):
        for _ in range(60):
            costs.observe(4, 0, factor * affine(4, 0))
    assert float(costs.seconds(4, 0)) == pytest.approx(affine(4, 0))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clock_that_shows_nothing_teaches_nothing(seconds: float) -> None:
    costs = table()
    for _ in range(30):
        costs.observe(4, 0, seconds)
        costs.observe(0, 0, 1.0)
    assert float(costs.seconds(4, 0)) == pytest.approx(affine(4, 0))


@pytest.mark.parametrize(
    ("rows", "contexts", "seconds", "named"),
    [
        ((1, 2), (0,), [[1.0]], "shape"),
        ((2, 1), (0,), [[1.0], [1.0]], r"rows = \[2, 1\]"),
        ((1,), (-1,), [[1.0]], r"contexts = \[-1\]"),
        ((1,), (0,), [[0.0]], "positive"),
        ((1,), (0,), [[float("nan")]], "positive"),
        ((), (0,), [], "shape"),
    ],
)
def test_bad_tables_are_refused(
    rows: tuple[int, ...], contexts: tuple[int, ...], seconds: list[list[float]], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        CostTable(rows, contexts, seconds)


def test_what_costs_exactly_what_the_table_says_changes_nothing() -> None:
    rows, contexts = (1, 4, 16, 64), (128, 1024, 4096)
    table = CostTable(
        rows, contexts, [[1e-3 * (1 + r + r * c / 500) for c in contexts] for r in rows]
    )
    before = table.profiled
    rng = np.random.default_rng(0)
    for _ in range(400):
        size, context = int(rng.integers(1, 200)), float(rng.integers(0, 9000))
        table.observe(size, context, float(table.seconds(size, context)))
    for context in contexts:
        found = table.seconds(rows, context)
        assert found == pytest.approx([line[contexts.index(context)] for line in before])

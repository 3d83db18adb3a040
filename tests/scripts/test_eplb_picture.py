"""The picture of rebalancing is drawn from what was measured, on prompts that drift."""

from pathlib import Path

import numpy as np
import pytest

from headrace.scripts.eplb_picture import Course, draw, drifting_prompts, figures


def course(balances: list[float], epochs: list[int]) -> Course:
    passes = len(balances)
    series = {
        "steps": list(range(5, 5 + passes)),
        "rows": [30.0] * passes,
        "balance": balances,
        "epoch": epochs,
    }
    return Course.of({"decode": {"instances": [{"series": series}]}})


def test_passes_without_rows_are_left_out():
    series = {
        "steps": [1, 2, 3],
        "rows": [4, 0, 4],
        "balance": [0.5, None, 1.0],
        "epoch": [0, 0, 1],
    }
    found = Course.of({"decode": {"instances": [{"series": series}]}})
    assert found.balance.tolist() == [0.5, 1.0]
    assert found.epoch.tolist() == [0, 1]
    assert found.over(0, 2) == pytest.approx(8 / (4 / 0.5 + 4 / 1.0))


def test_the_figures_are_those_of_the_parts(tmp_path: Path):
    on = course([0.7] * 40 + [0.9] * 60 + [0.6] * 30 + [0.88] * 70, [0] * 40 + [1] * 90 + [2] * 70)
    off = course([0.75] * 100 + [0.65] * 100, [0] * 200)
    found = figures(on, off, (0.49, 0.5), 10)
    assert found["plans_in_force_at"] == [40, 130]
    assert found["balance_at_first"] == 0.7
    assert found["balance_of_code"] == 0.9
    assert found["balance_at_the_dip"] == 0.6
    assert found["balance_of_prose"] == 0.88
    assert found["unmoved_balance_of_code"] == pytest.approx(0.75, abs=0.002)
    assert found["unmoved_balance_of_prose"] == pytest.approx(0.65, abs=0.002)
    draw(tmp_path / "p.png", on, off, (0.49, 0.5), 10)
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_prompts_turn_from_code_to_prose():
    prompts = drifting_prompts(40, seed=3)
    assert prompts == drifting_prompts(40, seed=3)
    assert len(set(prompts)) == 40

    def code_marks(texts: list[str]) -> float:
        return float(np.mean([sum(text.count(mark) for mark in "=_()") for text in texts]))

    assert code_marks(prompts[:20]) > 2 * code_marks(prompts[20:])

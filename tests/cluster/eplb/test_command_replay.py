"""``headrace eplb replay``: decisions in the order of time, from nothing but what had been seen."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cluster.cli import main
from headrace.cluster.eplb.config import EplbConfig
from headrace.cluster.eplb.measure import peak_over_mean
from headrace.cluster.eplb.replay import Pace, replay
from headrace.cluster.eplb.series import Series, load_placement, save_series
from headrace.model.placement import ExpertPlacement

LAYERS, EXPERTS, RANKS, SLOTS = 2, 32, 8, 6
PRESENT = ExpertPlacement.initial(
    layers=LAYERS, num_experts=EXPERTS, ranks=RANKS, slots_per_rank=SLOTS
).slots
CONFIG = EplbConfig(keep_steps=50)
PACE = Pace(interval=50, step_s=0.05)
EXPERT_BYTES = 1000


def turning_rows(steps: int = 400) -> np.ndarray:
    """Zipf-like rows whose order of experts turns round in the middle."""
    share = np.arange(1, EXPERTS + 1) ** -0.8
    rates = 600 * share / share.sum()
    rng = np.random.default_rng(4)
    first = rng.poisson(rates, (steps // 2, LAYERS, EXPERTS))
    second = rng.poisson(rates[::-1], (steps - steps // 2, LAYERS, EXPERTS))
    return np.concatenate([first, second])


def test_a_turn_is_seen_only_after_it_happened():
    rows = turning_rows()
    found = replay(rows, PRESENT, CONFIG, PACE, EXPERT_BYTES)
    assert [(part.first, part.end) for part in found.intervals] == [
        (first, first + 50) for first in range(0, 400, 50)
    ]
    outcomes = [part.outcome for part in found.intervals]
    assert outcomes[0] == "kept"
    assert outcomes[1] == outcomes[5] == "moved"
    balances = [part.balance for part in found.intervals]
    assert balances[0] == found.intervals[0].balance_unmoved
    assert balances[2] > balances[0] + 0.1
    assert balances[4] < balances[3] - 0.1
    assert balances[6] > balances[4] + 0.1
    assert found.balance > found.balance_unmoved


def test_what_comes_later_changes_nothing_before():
    rows = turning_rows()
    whole = replay(rows, PRESENT, CONFIG, PACE, EXPERT_BYTES).intervals
    half = replay(rows[:200], PRESENT, CONFIG, PACE, EXPERT_BYTES).intervals
    for part, other in zip(whole, half, strict=False):
        assert part.balance == other.balance
        assert part.moved_experts == other.moved_experts


def test_a_move_takes_its_bytes_over_the_bandwidth():
    rows = turning_rows(200)
    slow = EplbConfig(keep_steps=50, bandwidth_mib_per_s=0.001)
    pace = Pace(interval=50, step_s=0.001)
    found = replay(rows, PRESENT, slow, pace, EXPERT_BYTES)
    first = found.intervals[1]
    assert first.outcome == "moved"
    assert first.moved_bytes == first.moved_experts * EXPERT_BYTES
    assert first.moved_bytes / RANKS > 0.001 * 2**20 * 0.15
    for part in found.intervals[1:]:
        assert part.balance == part.balance_unmoved
    assert found.intervals[2].reason == "the last move is under way"


def test_a_gain_that_is_asked_for_and_not_there_moves_nothing():
    asking = EplbConfig(keep_steps=50, min_gain=0.99)
    found = replay(turning_rows(), PRESENT, asking, PACE, EXPERT_BYTES)
    assert {part.outcome for part in found.intervals} == {"kept"}
    assert found.balance == found.balance_unmoved
    assert (found.slots == PRESENT).all()


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loads") / "turn.npz"
    rows = turning_rows()
    save_series(path, Series(rows=rows, steps=np.arange(len(rows))))
    return path


def arguments(load: Path, *more: str) -> list[str]:
    shape = ["--load", str(load), "--ranks", str(RANKS), "--slots", str(SLOTS)]
    return ["eplb", "replay", *shape, *more]


def test_the_document_sums_up_its_intervals(
    load: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    output = tmp_path / "last.npz"
    more = ("--interval", "50", "--keep-steps", "50", "--expert-bytes", "1000", "--json")
    assert main(arguments(load, *more, "--output", str(output))) == 0
    out = capfd.readouterr().out
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    parts = found["intervals"]
    assert found["moves"] == sum(part["outcome"] == "moved" for part in parts) >= 2
    assert found["moved_bytes"] == sum(part["moved_bytes"] for part in parts)
    assert found["moved_experts"] * 1000 == found["moved_bytes"]
    rows = turning_rows()
    assert found["balance_unmoved"] == pytest.approx(1 / peak_over_mean(rows, PRESENT), abs=1e-4)
    last = load_placement(output, EXPERTS).slots
    assert 1 / peak_over_mean(rows[350:], last) > 1 / peak_over_mean(rows[350:], PRESENT)


def test_the_table_has_a_line_an_interval(load: Path, capfd: pytest.CaptureFixture[str]):
    assert main(arguments(load, "--interval", "200")) == 0
    out = capfd.readouterr().out
    assert "0-199" in out
    assert "200-399" in out
    assert "unmoved" in out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--interval", "0"), "--interval 0 is not allowed"),
        (("--step-ms", "0"), "--step-ms 0 is not allowed"),
        (("--min-gain", "-1"), "min_gain = -1"),
        (("--keep-steps", "0"), "keep_steps = 0"),
        (("--bandwidth-mib-per-s", "0"), "bandwidth_mib_per_s = 0"),
        (("--present", "/no/where.npz"), "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(
    load: Path, more: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]
):
    assert main(arguments(load, *more)) == 2
    error = capfd.readouterr().err
    assert said in error
    assert error.count("\n") == 1

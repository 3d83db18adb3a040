"""``headrace eplb plan`` and ``make-load`` from outside, and what files they refuse."""

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.cluster.cli import main
from headrace.cluster.eplb.measure import moved_slots, peak_over_mean
from headrace.cluster.eplb.series import load_placement, load_series
from headrace.model.placement import ExpertPlacement


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loads") / "drift.npz"
    shape = ("--steps", "40", "--layers", "3", "--experts", "32", "--assignments", "4000")
    assert main(["eplb", "make-load", "--kind", "drift", "--output", str(path), *shape]) == 0
    return path


def document(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    capfd.readouterr()
    status = main(["eplb", *arguments, "--json"])
    out = capfd.readouterr().out
    assert status == 0
    assert out.count("\n") == 1
    return json.loads(out)


def test_a_plan_is_judged_on_the_series_and_saved(
    load: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    output = tmp_path / "plan.npz"
    shape = ("--load", str(load), "--ranks", "8", "--slots", "5")
    found = document(capfd, "plan", *shape, "--output", str(output), "--expert-bytes", "1000")
    rows = load_series(load).rows
    before = ExpertPlacement.initial(layers=3, num_experts=32, ranks=8, slots_per_rank=5).slots
    after = load_placement(output, 32).slots
    assert found["before"]["peak_over_mean"] == round(peak_over_mean(rows, before), 4)
    assert found["after"]["peak_over_mean"] == round(peak_over_mean(rows, after), 4)
    assert found["after"]["peak_over_mean"] < found["before"]["peak_over_mean"]
    assert found["bound_peak_over_mean"] <= found["after"]["peak_over_mean"]
    assert found["moved_experts"] == moved_slots(after, before)
    assert found["moved_bytes"] == 1000 * found["moved_experts"]
    assert len(found["after"]["balance_by_layer"]) == 3
    assert np.array(found["after"]["rank_rows"]).sum() == pytest.approx(rows.sum(), abs=3)

    again = document(capfd, "plan", *shape, "--present", str(output), "--move-cost", "1e9")
    assert again["moved_experts"] == 0
    assert again["after"] == again["before"] == found["after"]


def test_held_out_steps_are_not_planned_for(load: Path, capfd: pytest.CaptureFixture[str]):
    shape = ("--load", str(load), "--ranks", "8", "--slots", "5")
    found = document(capfd, "plan", *shape, "--held-out", "0.25")
    assert found["judged_steps"] == 10
    assert found["planned_for"] == "a forecast of 30 steps"
    rows = load_series(load).rows
    before = ExpertPlacement.initial(layers=3, num_experts=32, ranks=8, slots_per_rank=5).slots
    assert found["before"]["peak_over_mean"] == round(peak_over_mean(rows[30:], before), 4)


def test_the_table_has_every_layer_and_the_map(load: Path, capfd: pytest.CaptureFixture[str]):
    capfd.readouterr()
    assert main(["eplb", "plan", "--load", str(load), "--ranks", "8", "--slots", "5"]) == 0
    out = capfd.readouterr().out
    assert "40 steps x 3 layers x 32 experts, 8 ranks x 5 slots" in out
    assert out.count("\n    2  ") == 1
    assert "▁ <0.5" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ranks", "0", "--slots", "5"), "--ranks 0 is not allowed: an integer of at least 1"),
        (("--ranks", "8", "--slots", "3"), "give at least --slots 4"),
        (("--ranks", "8", "--slots", "5", "--deadline", "0"), "--deadline 0"),
        (("--ranks", "8", "--slots", "5", "--deadline", "nan"), "--deadline nan"),
        (("--ranks", "8", "--slots", "5", "--move-cost", "-1"), "--move-cost -1"),
        (("--ranks", "8", "--slots", "5", "--held-out", "1"), "a share between 0 and 1"),
        (("--ranks", "8", "--slots", "5", "--held-out", "0.99"), "leaves nothing of 40 steps"),
        (("--ranks", "8", "--slots", "5", "--ranks-per-domain", "3"), "does not divide --ranks 8"),
        (("--ranks", "8", "--slots", "5", "--output", "/no/where.npz"), "/no, which is no folder"),
        (("--ranks", "8", "--slots", "5", "--present", "/no/where.npz"), "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(
    load: Path, arguments: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]
):
    assert main(["eplb", "plan", "--load", str(load), *arguments]) == 2
    error = capfd.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_present_placement_of_another_instance_is_refused(
    load: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    other = ExpertPlacement.initial(layers=3, num_experts=32, ranks=4, slots_per_rank=8).slots
    np.savez(tmp_path / "other.npz", slots=other)
    np.savez(tmp_path / "holes.npz", slots=np.zeros((3, 8, 5), np.int32))
    shape = ("--load", str(load), "--ranks", "8", "--slots", "5")
    for name, said in (("other", "[3, 4, 8]"), ("holes", "expert 0")):
        assert main(["eplb", "plan", *shape, "--present", str(tmp_path / f"{name}.npz")]) == 2
        assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"counts": np.ones((2, 3, 4))}, "no array 'rows' but counts"),
        ({"rows": np.ones((3, 4))}, "[3, 4]"),
        ({"rows": np.ones((0, 3, 4))}, "none of them 0"),
        ({"rows": -np.ones((2, 3, 4))}, "negative"),
        ({"rows": np.full((2, 3, 4), np.nan)}, "non-finite"),
        ({"rows": np.full((2, 3, 4), "x")}, "type"),
        ({"rows": np.array([object()])}, "plain arrays"),
        ({"rows": np.ones((2, 3, 4)), "steps": np.arange(3)}, "[3] for 2 steps"),
        ({"rows": np.ones((2, 3, 4)), "steps": np.array([5, 5])}, "step 5 follows step 5"),
    ],
)
def test_a_broken_series_is_refused(
    arrays: dict[str, np.ndarray], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    path = tmp_path / "load.npz"
    np.savez(path, **arrays)
    assert main(["eplb", "plan", "--load", str(path), "--ranks", "2", "--slots", "2"]) == 2
    error = capfd.readouterr().err
    assert str(path) in error
    assert said in error


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04torn", b"\x93NUMPY"])
def test_a_file_that_is_no_series_is_refused(
    content: bytes | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    path = tmp_path / "load.npz"
    if content is not None:
        path.write_bytes(content)
    assert main(["eplb", "plan", "--load", str(path), "--ranks", "2", "--slots", "2"]) == 2
    assert str(path) in capfd.readouterr().err


def test_a_torn_series_is_refused(load: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    whole = load.read_bytes()
    for cut in (len(whole) // 2, len(whole) - 30):
        (tmp_path / "torn.npz").write_bytes(whole[:cut])
        shape = ("--ranks", "8", "--slots", "5")
        assert main(["eplb", "plan", "--load", str(tmp_path / "torn.npz"), *shape]) == 2
        assert "torn.npz" in capfd.readouterr().err
    spoiled = bytearray(whole)
    spoiled[len(whole) // 2] ^= 0xFF
    (tmp_path / "torn.npz").write_bytes(spoiled)
    assert main(["eplb", "plan", "--load", str(tmp_path / "torn.npz"), *shape]) == 2


def test_the_same_load_comes_from_the_same_arguments(tmp_path: Path):
    rows = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        path = tmp_path / f"{name}.npz"
        shape = ("--steps", "5", "--layers", "2", "--experts", "8", "--seed", seed)
        assert main(["eplb", "make-load", "--kind", "topics", "--output", str(path), *shape]) == 0
        rows.append(load_series(path).rows)
    assert (rows[0] == rows[1]).all()
    assert (rows[0] != rows[2]).any()
    assert load_series(path).traffic_class == "topics"

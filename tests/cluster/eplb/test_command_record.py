"""What ``headrace eplb record`` collects from rings that forget."""

from pathlib import Path

import numpy as np
import pytest

from headrace.cluster.cli import main
from headrace.cluster.eplb.commands.record import Recorder
from headrace.cluster.eplb.series import load_series, save_series
from headrace.transfer.errors import ConfigError

from .reports import FakeReporter


def test_every_pass_is_kept_once(tmp_path: Path):
    reporter, recorder = FakeReporter(window=50), Recorder("decode", 0)
    recorder.begin(reporter)
    pieces = []
    for steps in (0, 7, 1, 0, 50, 12):
        pieces.append(reporter.advance(steps))
        recorder.look()
    rows = np.concatenate(pieces)
    assert recorder.lost_steps == 0
    assert reporter.reports == 1
    save_series(tmp_path / "series.npz", recorder.series("code"))
    series = load_series(tmp_path / "series.npz")
    assert (series.rows == rows).all()
    assert (series.steps == np.arange(len(rows))).all()
    assert series.traffic_class == "code"


def test_passes_that_were_missed_are_counted():
    reporter, recorder = FakeReporter(window=10), Recorder("decode", 0)
    recorder.begin(reporter)
    reporter.advance(5)
    recorder.look()
    reporter.advance(14)
    recorder.look()
    assert recorder.lost_steps == 4
    assert recorder.series("").steps.tolist() == [*range(5), *range(9, 19)]


def test_passes_without_rows_are_left_out():
    class Idle(FakeReporter):
        def advance(self, steps: int) -> np.ndarray:
            super().advance(steps)
            self._rows[-1] = 0
            return self._rows

    reporter, recorder = Idle(), Recorder("decode", 0)
    recorder.begin(reporter)
    for _ in range(3):
        reporter.advance(2)
    recorder.look()
    assert recorder.series("").steps.tolist() == [0, 2, 4]


def test_a_recording_of_nothing_is_an_error():
    with pytest.raises(ConfigError, match="no pass was recorded"):
        Recorder("decode", 0).series("")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--output", "/no/where.npz"), "which is no folder"),
        (("--output", "x.npz", "--instance", "1"), "--instance 1 is not allowed: 0 to 0"),
        (("--output", "x.npz"), "missing.jsonl"),
    ],
)
def test_what_is_wrong_is_named_before_a_cluster_starts(
    more: tuple[str, ...], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    source = str(tmp_path / "missing.jsonl")
    assert main(["eplb", "record", "local", "--input", source, *more]) == 2
    assert said in capfd.readouterr().err
    assert not Path("x.npz").exists()

"""Medians of what pausing costs."""

from headrace.decode.pause_meter import PauseMeter


def test_guesses_give_way_to_the_first_sample() -> None:
    meter = PauseMeter()
    assert (meter.costs.byte_s, meter.costs.row_s) == (1e-9, 1e-3)
    meter.moved(1000, 2.0)
    meter.recomputed(10, 5.0)
    assert (meter.costs.byte_s, meter.costs.row_s) == (2e-3, 0.5)


def test_a_hiccup_decides_nothing_and_old_samples_leave() -> None:
    meter = PauseMeter()
    for seconds in (1.0, 1.1, 900.0, 0.9, 1.0):
        meter.moved(1, seconds)
    assert meter.costs.byte_s == 1.0
    for _ in range(15):
        meter.moved(1, 3.0)
    assert meter.costs.byte_s == 3.0

import pytest

from headrace.transfer.tiers.rates import Rates, worth_reading


@pytest.mark.parametrize(
    ("num_tokens", "num_bytes", "load", "recompute", "worth"),
    [
        (
            128,
            113_920,
            1e-9,
            1e-5,
            True,
        ),  # a block at 1 GB/s against 100k tokens a second: 0.11 ms < 1.28 ms
        (128, 113_920, 1e-9, 5e-7, False),  # against 2M tokens a second: 0.11 ms > 0.064 ms
        (128, 113_920, 4e-7, 1e-5, False),  # 2.5 MB/s: 46 ms
        (1, 100, 1.0, 100.0, False),  # equal is not worth it
    ],
)
def test_reading_is_weighed_against_recomputing(
    num_tokens: int, num_bytes: int, load: float, recompute: float, worth: bool
) -> None:
    found = worth_reading(
        num_tokens, num_bytes, load_s_per_byte=load, recompute_s_per_token=recompute
    )
    assert found is worth


def test_rates_are_exponential_averages() -> None:
    rates = Rates(clock=lambda: 0.0)
    rates.note_load("disk", 10_000, 1.0)
    rates.note_load("disk", 10_000, 2.0)
    assert rates.load_s_per_byte == pytest.approx({"disk": 1e-4 + 0.2 * 1e-4})
    rates.note_prefill(10, 1.0)
    rates.note_prefill(10, 3.0)
    rates.note_prefill(0, 9.0)
    assert rates.recompute_s_per_token == pytest.approx(0.1 + 0.2 * 0.2)


def test_what_is_not_measured_is_read_and_what_lost_is_tried_again() -> None:
    now = [0.0]
    rates = Rates(retry_s=30, clock=lambda: now[0])
    assert rates.worth_reading(128, 100_000, "disk")
    rates.note_load("disk", 100_000, 10.0)
    assert rates.worth_reading(128, 100_000, "disk")  # nobody knows what recomputing takes
    rates.note_prefill(128, 0.1)
    assert not rates.worth_reading(128, 100_000, "disk")
    assert rates.worth_reading(128, 100_000, "memory")
    now[0] = 30.0
    assert rates.worth_reading(128, 100_000, "disk")
    rates.note_load("disk", 100_000, 10.0)
    assert not rates.worth_reading(128, 100_000, "disk")


def test_a_load_that_brought_nothing_counts_as_slow() -> None:
    rates = Rates(clock=lambda: 0.0)
    rates.note_load("objects", 0, 2.0)
    rates.note_prefill(100, 0.1)
    assert not rates.worth_reading(128, 114_024, "objects")

"""Rows and finish conditions on literal numbers."""

from headrace.decode.scheduler import Row, finish_reason, next_row
from headrace.transfer.request import SamplingParams


def test_the_first_row_is_the_last_prompt_token() -> None:
    assert next_row((5, 6, 7, 8, 9), ()) == Row(token_id=9, position=4, history=(6, 7, 8))
    assert next_row((5,), ()) == Row(token_id=5, position=0, history=())
    assert next_row((5, 6), ()) == Row(token_id=6, position=1, history=(5,))


def test_later_rows_feed_what_was_sampled() -> None:
    assert next_row((5, 6), (7,)) == Row(token_id=7, position=2, history=(5, 6))
    assert next_row((5, 6, 7, 8), (9, 10)) == Row(token_id=10, position=5, history=(7, 8, 9))
    assert next_row((5,), (1, 2, 3, 4, 5)) == Row(token_id=5, position=5, history=(2, 3, 4))


def test_finish_reasons() -> None:
    params, endless = SamplingParams(), SamplingParams(ignore_eos=True)
    assert finish_reason(1, 1, 5, params, eos_id=1) == "stop"
    assert finish_reason(1, 5, 5, params, eos_id=1) == "stop"
    assert finish_reason(1, 1, 5, endless, eos_id=1) is None
    assert finish_reason(1, 5, 5, endless, eos_id=1) == "length"
    assert finish_reason(9, 4, 5, params, eos_id=1) is None
    assert finish_reason(9, 5, 5, params, eos_id=1) == "length"
